#!/usr/bin/env bash
# torch 2.13.0: the fused forms of SGD, Adam, AdamW and Adagrad on the CPU read the gradient as if it lay in memory as
# its parameter does, from where it begins. Where it is transposed, has gaps or repeats rows, each number is updated
# with the gradient of another, without an error; the loop (foreach=False) is right. SGD's leaves parameters of 16 bits
# as they are, but for what is left over after whole vectors. Seen on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW


def updated(kind, parameter, gradient, **form):
    weight = torch.nn.Parameter(parameter.clone())
    weight.grad = gradient
    kind([weight], lr=0.1, **form).step()
    return weight.detach()


def compare(name, parameter, gradient, kinds=(SGD, Adam, AdamW, Adagrad)):
    said = []
    for kind in kinds:
        loop = updated(kind, parameter, gradient, foreach=False)
        fused = updated(kind, parameter, gradient, fused=True)
        few = (fused != parameter).float().mean() < 0.1
        said.append("as the loop" if torch.allclose(loop, fused, atol=2e-2) else "unchanged" if few else "wrong")
    print(f"{name}: {', '.join(f'{kind.__name__} {word}' for kind, word in zip(kinds, said))}")


torch.manual_seed(0)
weight, slope = torch.randn(40, 33), torch.randn(40, 33)
compare("same layout", weight, slope)
compare("both transposed", torch.randn(33, 40).t(), torch.randn(33, 40).t())
compare("transposed gradient", weight, torch.randn(33, 40).t())
compare("transposed parameter", torch.randn(33, 40).t(), slope)
compare("every second column", weight, torch.randn(40, 66)[:, ::2])
# Rows of one storage that overlap, as an expanded gradient's do; here what the kernels read instead exists.
compare("overlapping rows", weight, torch.randn(40 * 33).as_strided((40, 33), (0, 1)))
compare("bfloat16", weight.bfloat16(), slope.bfloat16(), (SGD, Adam))
compare("float16", weight.half(), slope.half(), (SGD,))
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
same layout: SGD as the loop, Adam as the loop, AdamW as the loop, Adagrad as the loop
both transposed: SGD as the loop, Adam as the loop, AdamW as the loop, Adagrad as the loop
transposed gradient: SGD wrong, Adam wrong, AdamW wrong, Adagrad wrong
transposed parameter: SGD wrong, Adam wrong, AdamW wrong, Adagrad wrong
every second column: SGD wrong, Adam wrong, AdamW wrong, Adagrad wrong
overlapping rows: SGD wrong, Adam wrong, AdamW wrong, Adagrad wrong
bfloat16: SGD unchanged, Adam as the loop
float16: SGD unchanged
SEEN
