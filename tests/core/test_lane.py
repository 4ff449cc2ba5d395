"""A lane keeps its order and its sums, whatever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core import lane as lane_module
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.request import Sequence, make_request
from tests.core.driver import make_request as make_new


def sequence(key: int, num_tokens: int) -> Sequence:
    request = make_request(make_new(f"r{key}", num_tokens), 0.0, key, [(float(key), key, 0)])
    return request.sequences[0]


@settings(deadline=None, derandomize=True)
@given(
    changes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=60),
    asked=st.integers(-1, 31),
)
def test_a_lane_is_a_sorted_list(changes: list[tuple[int, int]], asked: int) -> None:
    """Each key that comes up goes in, or out when it is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_module, "MAX_CHUNK_SIZE", 3)
        lane, known = Lane(), dict[int, Sequence]()
        for key, num_tokens in changes:
            if key in known:
                lane.remove(known.pop(key))
            else:
                known[key] = sequence(key, num_tokens)
                lane.insert(known[key])
        assert list(lane) == [seq for _, seq in sorted(known.items())]
        assert [key for key, _ in lane.entries()] == [seq.key for seq in lane]
        assert bool(lane) == bool(known)
        assert lane.num_tokens == sum(seq.num_prompt_tokens for seq in known.values())
        before = [seq for key, seq in known.items() if key < asked]
        num_tokens = sum(seq.num_prompt_tokens for seq in before)
        assert lane.before((float(asked), asked, 0)) == (len(before), num_tokens)
        assert all(seq in lane for seq in known.values())
        assert sequence(asked, 1) not in lane
