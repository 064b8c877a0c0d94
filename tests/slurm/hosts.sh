#!/bin/bash
# Hosts without a scheduler on this one machine, each with a network cable of its own to a common switch.
#
#   hosts.sh start DIR a b ...   each has a name, an address, process ids and a /dev/shm of its own
#   hosts.sh on DIR a COMMAND    run a command on a host
#   hosts.sh cut DIR b           pull b's cable out at the switch: nothing is closed, nothing comes through
#   hosts.sh stop DIR            ends all that runs there
#
# DIR/bin/ssh is what hosts reach each other by; it goes over the network. File systems are this machine's. Needs root.
set -euo pipefail
verb=${1:-} dir=${2:-}
[[ $verb =~ ^(start|on|cut|stop)$ && -n $dir ]] || { sed -n '2,9s/^# \?//p' "$0"; exit 2; }
shift 2
PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)

into() {  # host, command: within its namespaces, by the number of its first process
  local pid
  pid=$(<"$dir/$1.pid")
  nsenter --target "$pid" --mount --uts --net --pid "${@:2}"
}

start_host() {  # name
  # bash is the host's first process: it collects orphans, and when it goes the kernel ends all others.
  setsid unshare --mount --uts --net --pid --fork --kill-child --mount-proc --propagation private bash -c '
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm && mount --bind "$2" /etc/hosts && hostname "$1" && ip link set lo up &&
    touch "$3"; sleep infinity & wait' - "$1" "$dir/hosts" "$dir/$1.up" </dev/null >>"$dir/$1.log" 2>&1 &
  echo $! >"$dir/$1.outer"
  for _ in {1..100}; do
    if [[ -e $dir/$1.up ]]; then
      pgrep -P "$(<"$dir/$1.outer")" >"$dir/$1.pid"
      return
    fi
    sleep 0.05
  done
  cat "$dir/$1.log" >&2
  return 1
}

start() {
  mkdir -p "$dir/bin" && dir=$(cd "$dir" && pwd)
  printf '#!/bin/sh\nexec python3 %s/rsh.py "$@"\n' "$here" >"$dir/bin/ssh"
  chmod +x "$dir/bin/ssh"
  echo '127.0.0.1 localhost' >"$dir/hosts"
  local number=0 host
  for host in "$@"; do
    number=$((number + 1))
    echo "10.77.0.$number $host" >>"$dir/hosts"
  done
  start_host switch
  into switch ip link add bridge type bridge
  into switch ip link set bridge up
  number=0
  for host in "$@"; do
    number=$((number + 1))
    start_host "$host"
    ip link add "to-$host" netns "$(<"$dir/switch.pid")" type veth peer name eth0 netns "$(<"$dir/$host.pid")"
    into switch ip link set "to-$host" master bridge up
    into "$host" ip address add "10.77.0.$number/24" dev eth0
    into "$host" ip link set eth0 up
    into "$host" setsid python3 "$here/rsh.py" serve </dev/null >>"$dir/$host.log" 2>&1 &
  done
}

stop() {
  local file
  for file in "$dir"/*.outer; do
    [[ ! -e $file ]] || kill -9 "$(<"$file")" 2>/dev/null || true
    rm -f "$file"
  done
}

case $verb in
  start) start "$@" ;;
  on) into "$@" ;;
  cut) into switch ip link set "to-$1" down ;;
  stop) stop ;;
esac
