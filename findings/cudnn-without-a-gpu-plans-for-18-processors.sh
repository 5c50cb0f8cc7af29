#!/usr/bin/env bash
# cuDNN 9.20.0: a device may be described to it as JSON, so that heuristics and workspaces can be asked without a GPU.
# For compute capability 9.0, its persistent engines are then planned for 18 multiprocessors, whatever
# `multiProcessorCount` says: an engine limited to 18 (CUDNN_ATTR_ENGINE_SM_COUNT_TARGET) has a plan, one limited to 19
# is refused, for a device of 132 and of 264 alike, and partial sums of 18 instead of 132 are in the workspace. On an
# H200 the gradient of this weight takes 30,934,016 bytes; here 22,282,387. Seen on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check nvidia-cudnn-cu13==9.20.0.48 nvidia-cublas==13.1.0.3
cat >ask.py <<'PY'
import ctypes
import json
import sys

cudnn = ctypes.CDLL(f"{sys.argv[1]}/nvidia/cudnn/lib/libcudnn.so.9")
TYPE, INT64, FLOAT, MODE, KNOB, OBJECT, INT32, CHAR = 1, 3, 4, 7, 9, 15, 23, 24
FORMATS = {INT64: ctypes.c_int64, FLOAT: ctypes.c_float, OBJECT: ctypes.c_void_p, CHAR: ctypes.c_char}
kept = []


def make(descriptor, *attributes):
    made = ctypes.c_void_p()
    cudnn.cudnnBackendCreateDescriptor(descriptor, ctypes.byref(made))
    for name, kind, *values in attributes:
        array = (FORMATS.get(kind, ctypes.c_int) * len(values))(*values)
        kept.append(array)
        assert not cudnn.cudnnBackendSetAttribute(made, name, kind, ctypes.c_int64(len(values)), array)
    status = cudnn.cudnnBackendFinalize(made)
    if status:
        raise ValueError(status)
    return made.value


def device(processors):
    three = [2**31 - 1, 65535, 65535]
    properties = dict(
        deviceName="x", deviceVer=900, driverVer=13000, cudaDeviceId=0, multiProcessorCount=processors,
        smClockRateKHz=1500000, memClockRateKHz=1500000, l2CacheSize=40 << 20, totalGlobalMem=80 << 30, warpSize=32,
        regsPerBlock=65536, maxRegistersPerSM=65536, maxGridSize=three, maxBlockSize=[1024, 1024, 64],
        maxThreadsPerBlock=1024, maxThreadsPerSM=2048, maxCtasPerSM=32, maxSharedMemoryPerBlock=49152,
        maxSharedMemoryPerBlockOptin=232448, reservedSharedMemoryPerBlock=1024, sharedMemoryPerSM=233472,
        pciDeviceId=0, isTccDriver=0, supportCoopLaunch=1,
    )
    text = json.dumps(properties).encode() + b"\0"
    return make(38, (2702, CHAR, *(bytes([each]) for each in text)))


def tensor(name, *sizes):
    strides = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, strides[0] * size)
    return make(17, (901, TYPE, 0), (902, INT64, *sizes), (903, INT64, *strides), (906, INT64, name), (900, INT64, 32))


def workspace(processors, target):
    described = device(processors)
    image = (64, 512, 7, 7)
    sides = [(place, INT64, 1, 1) for place in (102, 103, 104, 105)]
    form = make(1, (100, TYPE, 0), (101, MODE, 1), (106, INT64, 2), *sides)
    parts = [(714, OBJECT, form), (715, OBJECT, tensor(119, 512, 512, 3, 3)), (716, OBJECT, tensor(120, *image))]
    gradient = make(11, *parts, (717, OBJECT, tensor(121, *image)), (712, FLOAT, 1.0), (713, FLOAT, 0.0))
    graph = make(15, (801, OBJECT, gradient))
    try:
        engine = make(2, (1300, OBJECT, graph), (1301, INT64, 68), (1307, OBJECT, described), (1306, INT32, target))
        choices = {2: 0, 13: 0, 18: 1, 25: 0, 27: 1, 28: 1}
        knobs = [make(7, (600, KNOB, kind), (601, INT64, value)) for kind, value in choices.items()]
        plan = make(5, (401, OBJECT, make(3, (300, OBJECT, engine), (302, OBJECT, *knobs))), (407, OBJECT, described))
    except ValueError as error:
        return f"refused ({error})"
    size, count = ctypes.c_int64(), ctypes.c_int64()
    read = ctypes.c_void_p(plan), 402, INT64, ctypes.c_int64(1), ctypes.byref(count), ctypes.byref(size)
    assert not cudnn.cudnnBackendGetAttribute(*read)
    return size.value


for processors in (132, 264):
    for target in (17, 18, 19):
        print(f"a device of {processors}, limited to {target}:", workspace(processors, target))
PY
venv/bin/python ask.py venv/lib/python3*/site-packages | tee seen
diff - seen <<'SEEN'
a device of 132, limited to 17: 23331027
a device of 132, limited to 18: 22282387
a device of 132, limited to 19: refused (3000)
a device of 264, limited to 17: 23331027
a device of 264, limited to 18: 22282387
a device of 264, limited to 19: refused (3000)
SEEN
