"""Fly a simulated approach by camera: detect the runway, solve for the position, fuse it with other sensors.

python examples/land_by_camera.py
"""

# %% [markdown]
# # Land
#
# Keypoints of a runway are its four corners. With their covariances a camera image gives the position of the aircraft
# and its covariance. A filter fuses it with GNSS, ILS, radio altimeter and inertial sensors. You need
# `pip install ./models '.[ultralytics,landing]'` in a clone. The world is simulated; nothing here has flown.
#
# ## Fly
#
# On the command line: `halopose land simulate --weather clear --seed 3`. That also writes an animation and a page. From
# Python, with one image every eight seconds so that it is quick:

# %%
from halopose.landing.landing_settings import LandingSettings
from halopose.landing.run import simulate
from halopose.landing.shipped_detectors import load_detector

model = load_detector()
settings = LandingSettings(seed=3, rate=0.125)
landing = simulate(model, settings)
flight = landing.flight
print(f"{len(flight.frame_times)} frames, runway found in {landing.summary['runway_detected']}")

# %% [markdown]
# ## What the camera sees
#
# The detector is a pose model, so its result is the same type as for persons.

# %%
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import sample_scene

poses = model.predict(render_scene(sample_scene(5)), conf=0.7)[0]
poses

# %% [markdown]
# ## Errors and what the filter states
#
# `flight.fused` is the position from all sensors, `flight.fused_covariance` its covariance. The axes are those of the
# runway: x along the landing direction, y to the left, z up; the origin is at the threshold.

# %%
import numpy as np

error = flight.fused - flight.position
stated = np.sqrt(np.diagonal(flight.fused_covariance, axis1=1, axis2=2))
print("distance     error along / lateral / up      stated standard deviations")
for number in range(0, len(flight.frame_times), 2):
    off, sigma = error[number], stated[number]
    print(
        f"{-flight.position[number, 0]:6.0f} m   "
        f"{off[0]:7.1f} {off[1]:7.1f} {off[2]:7.1f} m       {sigma[0]:6.1f} {sigma[1]:6.1f} {sigma[2]:6.1f} m"
    )

# %% [markdown]
# ## Without satellites
#
# Leave GNSS and ILS out: vision, radio altimeter and inertial sensors remain.

# %%
from dataclasses import replace

fewer = replace(settings.sensors, gnss=None, localizer=None, glide_slope=None)
alone = simulate(model, replace(settings, sensors=fewer)).flight
for name, each in {"all sensors": flight, "without GNSS and ILS": alone}.items():
    rmse = np.sqrt(((each.fused - each.position) ** 2).sum(axis=1).mean())
    print(f"{name}: root mean square position error {rmse:.1f} m")

# %% [markdown]
# Next: [replay your own recording](../how-to/land-your-recording.md) · [integrity](../explanation/integrity.md) ·
# [measured results](../evidence/landing.md)
