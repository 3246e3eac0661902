#!/usr/bin/env bash
# The documentation as a site, from docs/ and the docstrings: built into a folder, or served while it is written.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: scripts/site.sh [build [DIR] | serve [ADDRESS:PORT]]

  build    builds the site into DIR (default: build/site); warnings, such as a link that leads nowhere, are errors.
           Its pages can be opened as files, or put on any file server: they need no other server, for search neither.
  serve    builds it, serves it on ADDRESS:PORT (default: 127.0.0.1:8000), and again whenever a page is saved

With the Python of .venv, else python3; what is missing there is installed from the extra "docs" of setup.py.
USAGE
}
command=${1:-build}
case $command in
  -h|--help) usage; exit ;;
  build|serve) ;;
  *) usage >&2; die "unknown command: $command" ;;
esac
[ $# -le 2 ] || { usage >&2; die "too many arguments"; }
where=${2:-}
if [ "$command" = build ]; then where=$(realpath -m "${where:-$ROOT/build/site}"); fi
python=$VENV/bin/python
[ -x "$python" ] || python=python3
cd "$ROOT"
if ! "$python" -c 'import griffe, material, mkdocs, mkdocstrings_handlers.python, msgspec' 2>/dev/null; then
  say "Installing what builds the site"
  "$python" -m pip install -q -e "$ROOT[docs]" || die "pip could not install it; in an environment of its own:
       python3 -m venv .venv-docs && VENV=.venv-docs scripts/site.sh"
fi
export NO_MKDOCS_2_WARNING=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
if [ "$command" = serve ]; then
  exec "$python" -m mkdocs serve --strict --watch hvd_async --watch scripts/website --dev-addr "${where:-127.0.0.1:8000}"
fi
"$python" -m mkdocs build --strict --site-dir "$where" || die "the site was not built: each WARNING above is an error"
say "The site is in $where: open $where/index.html"
