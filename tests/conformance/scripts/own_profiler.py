from torch.profiler import ProfilerActivity, profile, record_function
from training import make, step

model, optimizer = make()
for number in range(5):
    if number == 2:
        # Not its memory: the job's profiler reports the size of what memprof had recorded before when it is freed.
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            with record_function("own"):
                print(step(model, optimizer).hex())
        averages = sorted((event.key, event.count) for event in profiler.key_averages())
        print(*averages, sep="\n")
    else:
        print(step(model, optimizer).hex())
