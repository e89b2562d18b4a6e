"""Stand-in for NVML with three cards a, b and c; c1 is a MIG instance of c."""

from types import SimpleNamespace


class FakeNvml:
    """Each card takes 50 W, and its energy counter rises by 3 J at each reading."""

    NVML_CLOCK_SM = 1

    def __init__(self, counted='abc', powered='abc', num_cards=3):
        self._counted, self._powered, self._num_cards = counted, powered, num_cards
        self._millijoules = dict.fromkeys('abc', 10_000)

    def __getattr__(self, name):
        values = {
            'nvmlInit': None,
            'nvmlDeviceGetCount': self._num_cards,
            'nvmlSystemGetDriverVersion': b'535.129.03',
            'nvmlDeviceGetCudaComputeCapability': (8, 0),
            'nvmlDeviceGetName': b'A100',
            'nvmlDeviceGetDeviceHandleFromMigDeviceHandle': 'c',
            'nvmlDeviceGetMemoryInfo': SimpleNamespace(total=40 << 30, used=10),
            'nvmlDeviceGetClockInfo': 1400,
        }
        return lambda *_: values[name]  # any other function fails, as on a MIG device

    def nvmlDeviceGetHandleByIndex(self, number):
        return 'abc'[number]

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return len(handle) > 1

    def nvmlDeviceGetUUID(self, handle):
        return {'a': b'GPU-a0', 'b': 'GPU-b1', 'c': 'GPU-c2', 'c1': 'MIG-c1'}[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {'GPU-a0': 'a', 'GPU-b1': 'b', 'GPU-c2': 'c', 'MIG-c1': 'c1'}[uuid]

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f'00000000:{"abc".index(handle)}B:00.0')

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle not in self._counted:
            raise RuntimeError('Not Supported')
        self._millijoules[handle] += 3000
        return self._millijoules[handle]

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle not in self._powered:
            raise RuntimeError('Not Supported')
        return 50_000
