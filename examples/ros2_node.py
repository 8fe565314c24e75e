"""ROS 2 node that publishes the camera pose with a covariance whenever it detects the runway.

    python examples/ros2_node.py    # without ROS: the message of one rendered frame
    python examples/ros2_node.py --camera camera.yaml --runway KSFO/28R --topic /camera/compressed

Subscribes to `sensor_msgs/CompressedImage` and publishes `geometry_msgs/PoseWithCovarianceStamped` in the frame
`runway`: origin at the threshold, x along the landing direction, y left, z up. The pose is that of the camera's optical
frame. All six degrees of freedom come from the four corners; `halopose land` fuses them with other sensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from halopose import UncertainPose
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_pose
from halopose.landing.recordings.cameras import Lens, read_camera
from halopose.landing.recordings.ros_messages import fill, pose_message
from halopose.landing.recordings.runway_sites import read_runway
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import sample_scene
from halopose.types import Array

CONFIDENCE = 0.7


def located(model: UncertainPose, image: Array, lens: Lens, corners: Array, stamp: Mapping[str, int]) -> Any:
    """Content of the pose message, or None if no runway is detected or no pose fits."""
    poses = lens.rectified(model.predict(image, conf=CONFIDENCE)[0])
    if not len(poses):
        return None
    best = [int(np.argmax(poses.scores))]
    found = solve_pose(Observations(lens.camera, corners, poses.keypoints[best], poses.covariance[best]))
    if not found.converged[0]:
        return None
    return pose_message(stamp, "runway", found.position[0], found.rotation[0].T, found.covariance[0])


def spin(model: UncertainPose, lens: Lens, corners: Array, topic: str) -> None:
    """Run as a ROS 2 node until interrupted."""
    import rclpy
    from geometry_msgs.msg import PoseWithCovarianceStamped
    from sensor_msgs.msg import CompressedImage

    rclpy.init()
    node = rclpy.create_node("halopose")
    publisher = node.create_publisher(PoseWithCovarianceStamped, "/halopose/camera/pose", 10)

    def look(message: Any) -> None:
        image = cv2.imdecode(np.frombuffer(message.data, np.uint8), cv2.IMREAD_COLOR)
        stamp = {"sec": message.header.stamp.sec, "nanosec": message.header.stamp.nanosec}
        content = located(model, np.asarray(image), lens, corners, stamp)
        if content is not None:
            publisher.publish(fill(PoseWithCovarianceStamped(), content))

    node.create_subscription(CompressedImage, topic, look, 1)
    rclpy.spin(node)


def main() -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--camera", type=Path)
    parser.add_argument("--runway", default="KSFO/28R")
    parser.add_argument("--topic", default="/camera/compressed")
    options = parser.parse_args()
    model = UncertainPose.load_base("runway-footage")  # calibrated for real cameras
    if options.camera is not None:
        spin(model, read_camera(options.camera), read_runway(options.runway).corners, options.topic)
        return None
    scene = sample_scene(5)
    now = {"sec": 0, "nanosec": 0}
    content: dict[str, Any] | None = located(
        model, render_scene(scene), Lens(scene.camera), scene.runway.corners(), now
    )
    if content is None:
        print("no runway detected")
        return None
    place = content["pose"]["pose"]["position"]
    sigma = np.sqrt(np.diag(np.reshape(content["pose"]["covariance"], (6, 6))))[:3]
    for axis, true, spread in zip("xyz", scene.camera_pose()[1].tolist(), sigma.tolist(), strict=True):
        print(f"{axis} {place[axis]:9.1f} m, predicted standard deviation {spread:6.1f} m, truth {true:9.1f} m")
    return content


if __name__ == "__main__":
    main()
