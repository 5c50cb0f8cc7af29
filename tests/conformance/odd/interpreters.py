"""Ways to start Python and to name a program."""

from __future__ import annotations

from tests.conformance.odd.jobs import shell

_LOOK = "surroundings.py look"

INTERPRETERS = [
    # Flags.
    shell("python -O", "{command} {python} -O surroundings.py look trains"),
    shell("python -OO", f"{{command}} {{python}} -OO {_LOOK}"),
    shell("python -X dev", f"{{command}} {{python}} -X dev {_LOOK}"),
    shell("python -X dev trains", "{command} {python} -X dev surroundings.py trains"),
    shell(
        "python -X with values",
        f"{{command}} {{python}} -X faulthandler -X utf8 -X int_max_str_digits=700 -X tracemalloc=3 {_LOOK}",
    ),
    shell("python -X frozen_modules", f"{{command}} {{python}} -X frozen_modules=off {_LOOK}"),
    shell("python -X importtime", "{command} {python} -X importtime surroundings.py look 2>/dev/null"),
    shell("python -W error", f"{{command}} {{python}} -W error {_LOOK}"),
    shell("python -W error trains", "{command} {python} -W error::DeprecationWarning surroundings.py trains"),
    shell("python -I", f"{{command}} {{python}} -I {_LOOK}"),
    shell("python -S", f"{{command}} {{python}} -S {_LOOK}"),
    shell("python -sE", f"{{command}} {{python}} -sE {_LOOK}"),
    shell("python -u -bb -B -q", f"{{command}} {{python}} -u -bb -B -q {_LOOK}"),
    shell("python -P", f"{{command}} {{python}} -P {_LOOK}"),
    shell("python -x", f"{{command}} {{python}} -x {_LOOK}"),
    shell("python -c", "{command} {python} -c 'import surroundings; surroundings.look(); print(__spec__)' one -c two"),
    shell("python -VV", "{command} {python} -VV"),
    shell("an unknown flag", "{command} {python} -Z", 2),
    # Programs that do not come from a file.
    shell("a program on standard input", "echo 'import sys; print(sys.argv, __name__)' | {run} - one"),
    shell("a command's standard input", "{command} {python} - one two < in_turn.py"),
    shell("a device as program", "echo 'import sys; print(sys.argv, __file__)' | {run} /dev/stdin one"),
    shell("no program", "echo 'print(3)' | {command} {python}"),
    shell("python -i", "echo 'print(here)' | {command} {python} -i -c 'here = 3'"),
    shell("an interactive session", "printf 'import torch\\ntorch.ones(2)\\n1/0\\n' | {command} {python} -i -q"),
    # Where a program lies.
    shell(
        "zipped programs",
        "mkdir app && cp surroundings.py app/__main__.py && touch -d 2020-01-01 app/* && "
        "{python} -m zipapp app -o a.pyz && {run} a.pyz look; {run} ./a.pyz look; {run} app look",
    ),
    shell(
        "a package and its parts",
        "mkdir pkg && touch pkg/__init__.py && cp surroundings.py pkg/__main__.py && cp surroundings.py pkg/sub.py && "
        "{run} -m pkg look; {run} -m pkg.sub look; {run} -m pkg.__main__ look",
    ),
    shell(
        "modules of Python", "{run} -m json.tool </dev/null; {run} -m this | head -1; {run} -m compileall -q package"
    ),
    shell(
        "a link to a program",
        "mkdir links && ln -s ../surroundings.py links/way.py && ln -s links more && {run} more/way.py look; "
        "{run} links/../links/way.py look",
    ),
    shell("an absolute path", 'cd / && {run} "$OLDPWD/surroundings.py" look'),
    shell(
        "a name with a newline",
        "mkdir 'a b ü' && cp surroundings.py \"$(printf 'a b ü/x y\\nz.py')\" && "
        "{run} \"$(printf 'a b ü/x y\\nz.py')\" look",
    ),
    shell("names that look like options", "cp surroundings.py ./-x.py && {run} ./-x.py look -- --light -o"),
    shell("a name without a suffix", "cp surroundings.py noend && {run} noend look"),
    shell(
        "a name that is no text",
        # Strict as in most locales: in C's, what is no text is printed. Not its path, whose length differs.
        "cp surroundings.py \"$(printf 'b\\377.py')\" && "
        "PYTHONIOENCODING=utf-8:strict {run} \"$(printf 'b\\377.py')\" arguments",
        1,
    ),
    shell(
        "a compiled program", "{python} -m py_compile surroundings.py && mv __pycache__/*.pyc s.pyc && {run} s.pyc look"
    ),
    # Commands around it.
    shell("nohup", f"{{command}} nohup {{python}} {_LOOK} 2>/dev/null"),
    shell("nice and env", f"{{command}} nice -n 5 env -u PATH A=1 {{python}} {_LOOK}"),
    shell("no environment", f"{{command}} env -i {{python}} {_LOOK}"),
    shell("a session of its own", f"{{command}} setsid -w {{python}} {_LOOK}"),
    shell("timeout", "{command} timeout 1 {python} -c 'import time; time.sleep(60)'", 124),
    shell("xargs", "echo surroundings.py look | {command} xargs {python}"),
    shell(
        "a script around it",
        "printf '#!/bin/sh\\nexec \"$@\"\\n' > w && chmod +x w && {command} ./w {python} surroundings.py look",
    ),
    shell(
        "a background process",
        "{command} sh -c '{python} -Sc \"import time; time.sleep(0.5); print(7)\" & echo first'",
    ),
    shell(
        "torchrun",
        "{command} {python} -m torch.distributed.run --standalone --nproc_per_node=2 loops.py rank 2>/dev/null",
    ),
]
