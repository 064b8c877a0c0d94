#!/bin/bash
# A real Slurm of two nodes, n1 and n2, on this one machine, for tests of what happens between nodes.
#
#   two_nodes.sh start DIR       munged, slurmctld and two slurmd, all of whose files are in DIR (what runs already stays)
#   two_nodes.sh kill DIR NODE   the node's power is cut: every process on it dies at once
#   two_nodes.sh stop DIR        ends what start started, by process id, with all jobs
#   SLURM_CONF=DIR/slurm.conf sbatch|salloc|squeue|scancel ...
#
# Each node has a hostname, process ids, a /dev/shm, a disk (DIR/local) and a share of the cores of its own. The network
# and the other file systems are this machine's. Needs root, and the Debian packages slurm-wlm and munge.
set -euo pipefail
verb=${1:-} dir=${2:-} node=${3:-}
[[ $verb =~ ^(start|stop|kill)$ && -n $dir && ( $verb != kill || -n $node ) ]] || { sed -n '2,10s/^# \?//p' "$0"; exit 2; }
PATH=$PATH:/usr/sbin:/sbin

alive() { [[ -s $1 ]] && kill -0 "$(<"$1")" 2>/dev/null; }

configure() {
  local port=$((20000 + RANDOM % 20000))
  cat >"$dir/slurm.conf" <<END
ClusterName=two
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.sock
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdSpoolDir=$dir/spool.%n
TmpFS=$dir/local
SlurmdPidFile=$dir/spool.%n/slurmd.pid
SlurmdLogFile=$dir/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=60
KillWait=2
InactiveLimit=0
# Jobs are looked at every second, not every minute; and nothing is given up on because this machine is busy.
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
BatchStartTimeout=120
MessageTimeout=60
TCPTimeout=30
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=8 State=UNKNOWN
PartitionName=two Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=2
PartitionName=low Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
END
}

start_node() {  # name, cores
  # bash is the node's first process: it collects orphans, and when it goes the kernel ends all others. Process ids begin
  # anywhere: MPI's daemons name folders in /tmp by them, and a node that died has left its own.
  setsid unshare --mount --uts --pid --fork --kill-child --mount-proc --propagation private taskset -c "$2" bash -c '
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm && mount -t tmpfs -o mode=1777 tmpfs "$2" && hostname "$1" &&
    echo $RANDOM >/proc/sys/kernel/ns_last_pid
    slurmd -D -f "$SLURM_CONF" -N "$1" & wait' - "$1" "$dir/local" \
    </dev/null >>"$dir/$1.log" 2>&1 &
  echo $! >"$dir/$1.pid"
}

start() {
  mkdir -p "$dir"/{state,spool.n1,spool.n2,local} && chmod 755 "$dir" && dir=$(cd "$dir" && pwd)
  for program in munged slurmctld slurmd; do
    command -v $program >/dev/null || { echo "no $program here: apt-get install slurm-wlm munge" >&2; exit 1; }
  done
  [[ -s $dir/munge.key ]] || (umask 077; head -c 1024 /dev/urandom >"$dir/munge.key")
  alive "$dir/munged.pid" ||
    munged --force --socket="$dir/munge.sock" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
           --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"
  [[ -s $dir/slurm.conf ]] || configure
  export SLURM_CONF=$dir/slurm.conf
  alive "$dir/slurmctld.pid" || slurmctld -f "$SLURM_CONF"
  local last=$(($(nproc) - 1)) half
  half=$((last / 2))
  alive "$dir/n1.pid" || start_node n1 "0-$half"
  alive "$dir/n2.pid" || start_node n2 "$((last > 0 ? half + 1 : 0))-$last"
  for node in n1 n2; do  # of one whose power was cut Slurm would wait for the end of its jobs
    [[ ! -e $dir/$node.cut ]] || { rm "$dir/$node.cut"; scontrol update NodeName=$node State=DOWN Reason=power; }
    [[ $(sinfo -h -n $node -o %T 2>/dev/null) != down* ]] ||
      scontrol update NodeName=$node State=RESUME 2>/dev/null || true  # it may have come back by itself
  done
  for _ in {1..150}; do
    [[ $(sinfo -h -N -p two -o %T 2>/dev/null | grep -c -E '^(idle|mixed|allocated)$') == 2 ]] &&
      { echo "export SLURM_CONF=$SLURM_CONF"; return; }
    sleep 0.2
  done
  echo "the nodes did not come up: see $dir/*.log" >&2
  exit 1
}

cut_power() {
  alive "$dir/$node.pid" && kill -9 "$(<"$dir/$node.pid")" && rm "$dir/$node.pid" && touch "$dir/$node.cut"
}

stop() {
  [[ -d $dir ]] || return 0
  dir=$(cd "$dir" && pwd)
  for name in n1 n2 slurmctld munged; do  # with a node goes all that runs there
    ! alive "$dir/$name.pid" || kill -9 "$(<"$dir/$name.pid")"
    rm -f "$dir/$name.pid"
  done
}

case $verb in start) start ;; stop) stop ;; kill) cut_power ;; esac
