"""Peer memory over CUDA itself, by two processes on one GPU: gpu_peers_one_device.py."""

import pytest

from tests.gpu_peers_cases import CASES
from tests.gpu_peers_one_device import CASE_S, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(CASE_S + 30)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_on_one_gpu(name):
    assert run_case(name) == []
