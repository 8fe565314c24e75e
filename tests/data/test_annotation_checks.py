"""A few invalid annotations are skipped and named; many are an error."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halopose.data.annotation_checks import MANY, Faults
from halopose.errors import HaloposeError


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sound=st.integers(0, 200), first=st.integers(0, 40), second=st.integers(0, 40))
def test_the_share_of_all_faults_together_decides(
    sound: int, first: int, second: int, caplog: pytest.LogCaptureFixture
) -> None:
    total, faults = sound + first + second, Faults("source")
    faults.seen(total)
    for reason, count in (("one fault", first), ("another", second)):
        for number in range(count):
            faults.add(reason, f"line {number}")
    caplog.clear()
    if first + second > MANY * total:
        with pytest.raises(HaloposeError, match="line 0"):
            faults.judge()
    else:
        with caplog.at_level("WARNING", logger="halopose"):
            faults.judge()
        assert caplog.text.count("left out") == (first > 0) + (second > 0)
