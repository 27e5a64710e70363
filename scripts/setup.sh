#!/bin/sh
# Prepare .venv: `setup.sh demo` with what training on JAX needs, `setup.sh complete` with everything the tests need,
# `setup.sh targets` with the compilers of TPUs and GPUs too, which need neither.
#
# .venv/READY records what the environment was made from. Equal: nothing to do. A file .venv/UNFINISHED means that an
# earlier run was stopped half-way; pip takes a half-copied package for an installed one, so that one starts afresh.
# An environment with neither file was made by hand: it is completed, never removed.
set -eu
cd "$(dirname "$0")/.."

kind="$1"
venv=.venv
began=$(date +%s)

# Where the environment is activated, its own Python comes first; it cannot make its successor.
path=":$PATH:"
own=":$PWD/$venv/bin:"
case "$path" in
    *"$own"*)
        path="${path%%"$own"*}:${path#*"$own"}"
        path="${path#:}"
        PATH="${path%:}"
        ;;
esac

say() {
    printf 'setup: %s\n' "$*"
}

# Prints the version and the home of a usable Python; fails, with the reason, for any other.
describe='
import sys
version = ".".join(map(str, sys.version_info[:3]))
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"is Python {version}")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit(f"lacks the module {error.name} (on Debian and Ubuntu: the package python3-venv)")
print(version, sys.base_prefix)
'

# Prints the command of the first Python that runs and will do. A shim of a version manager may exist and not run.
find_python() {
    tried=''
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.11 python
    fi
    for candidate in "$@"; do
        place=$(command -v "$candidate" || true)
        if [ -z "$place" ]; then
            reason='is not there'
        elif [ "${place#"$PWD/$venv/"}" != "$place" ]; then
            reason='is that of the environment itself'
        elif reason=$("$candidate" -c "$describe" 2>&1); then
            printf '%s\n' "$candidate"
            return
        else
            reason=$(printf '%s\n' "$reason" | head -n 1)
        fi
        tried="$tried
  $candidate $reason"
    done
    say "no usable Python. Shardwright needs one from 3.11 to 3.13. Tried:$tried" >&2
    say "Install one, or name one: make setup PYTHON=/path/to/python3.12" >&2
    exit 2
}

# What an environment is made from: a line that changes when it has to be made again.
recipe() {
    printf '%s | %s | %s | %s\n' "$1" "$2" "$PWD" "$(cat pyproject.toml constraints.txt | cksum)"
}

python=''
if [ -n "${PYTHON:-}" ]; then
    python=$(find_python)
fi
reuse=''
if [ ! -e "$venv/UNFINISHED" ] && made_with=$("$venv/bin/python" -c "$describe" 2>/dev/null); then
    if [ -z "$python" ] || [ "$made_with" = "$("$python" -c "$describe")" ]; then
        ready=$(cat "$venv/READY" 2>/dev/null || true)
        # Each has what those after it have.
        case "$kind" in
            targets) suffice=targets ;;
            complete) suffice='targets complete' ;;
            *) suffice="targets complete $kind" ;;
        esac
        for enough in $suffice; do
            if [ "$ready" = "$(recipe "$enough" "$made_with")" ]; then
                exit 0
            fi
        done
        # The commands in an environment name its folder, so that one which was moved is of no use.
        case "$ready" in
            '' | *" | $made_with | $PWD | "*) reuse=yes ;;
        esac
    fi
fi

if [ -z "$reuse" ]; then
    python=${python:-$(find_python)}
    made_with=$("$python" -c "$describe")
    say "making $venv with $python (Python ${made_with%% *})"
    # Its Python goes first: what is left, if this is stopped here, is then not taken for one made by hand.
    rm -f "$venv/bin/python"
    rm -rf "$venv"
    mkdir "$venv"
    : >"$venv/UNFINISHED"
    "$python" -m venv "$venv"
fi
: >"$venv/UNFINISHED"
rm -f "$venv/READY"

# As variables they hold for the build of our own package too.
PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
export PIP_CONSTRAINT PIP_BUILD_CONSTRAINT

install() {
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input --editable "$1"
}
say "installing JAX and what training needs"
install '.[jax]'
if [ "$kind" != demo ]; then
    say "installing PyTorch (the largest part)"
    install '.[jax,torch]'
    say "installing the tools of the tests"
    install '.[jax,torch,dev]'
fi
if [ "$kind" = targets ]; then
    say "installing the compilers of TPUs and GPUs"
    install '.[jax,torch,dev,tpu,gpu-compile]'
fi
"$venv/bin/shardwright" --help >/dev/null

recipe "$kind" "$made_with" >"$venv/READY"
rm -f "$venv/UNFINISHED"
say "$venv is ready, after $(($(date +%s) - began)) s; try $venv/bin/shardwright --help"
