#!/bin/bash
# Can Open MPI start a rank on a host of a running job, where ranks have died? Two hosts (network namespaces) on this
# machine, and the flags of oars run. Needs root.
#
#   docs/obstacles/spawn.sh none host b        nobody died
#   docs/obstacles/spawn.sh rank host b        b's rank was killed
#   docs/obstacles/spawn.sh host host b        b's rank and its MPI daemon were killed
#   docs/obstacles/spawn.sh host add-host b:1  the same; b is added anew
set -euo pipefail
[[ $# == 3 ]] || { sed -n '2,8s/^# \?//p' "$0"; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
hosts=$root/tests/slurm/hosts.sh
python=${PYTHON:-$root/.venv/bin/python}
dir=$(mktemp -d)
PATH=$dir/bin:$(dirname "$python"):$PATH
export PATH OARS_RUN_FOLDER=$dir PRTE_MCA_prte_tmpdir_base=$dir
trap '"$hosts" stop "$dir"; rm -rf "$dir"' EXIT
"$hosts" start "$dir" a b

on_b() {  # the processes on b whose command has this word
  local pid
  for pid in $(pgrep -f "$1"); do
    [[ $(nsenter --target "$pid" --uts hostname 2>/dev/null) != b ]] || echo "$pid"
  done
}

timeout 40 "$hosts" on "$dir" a mpirun -n 3 --host a:2,b:2 --bind-to none --map-by slot:OVERSUBSCRIBE \
  --prtemca plm ssh --prtemca plm_ssh_agent "$python -I $root/src/oars/hosts/keeper.py hold 20 ssh --" \
  --prtemca plm_ssh_no_tree_spawn 1 --with-ft ulfm --mca coll ^han --mca btl ^ofi --allow-run-as-root \
  --prtemca state_base_recoverable 1 --prtemca state_base_notify_errors 1 -x PATH \
  "$python" "$here/spawn.py" "$dir" "$2" "$3" &
for _ in {1..300}; do
  [[ ! -e $dir/rank-0 || ! -e $dir/rank-1 || ! -e $dir/rank-2 ]] || break
  sleep 0.1
done
sleep 1
case $1 in
  rank) kill -9 $(on_b obstacles/spawn.py) ;;
  host) kill -9 $(on_b prted) $(on_b obstacles/spawn.py) ;;
esac
sleep 2
touch "$dir/go"
wait || true
