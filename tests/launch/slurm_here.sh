#!/usr/bin/env bash
# A whole Slurm on this machine, to try batch scripts with: one controller and two node daemons on loopback.
#   slurm_here.sh install          Debian packages slurm-wlm and munge (as root)
#   slurm_here.sh start DIRECTORY  write the configuration there and start the daemons; prints the line to export
#   slurm_here.sh stop DIRECTORY   end the daemons that `start` started
# Then: export SLURM_CONF=DIRECTORY/slurm.conf; sinfo; sbatch ...
set -euo pipefail

install() {
  command -v sbatch >/dev/null && command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && return
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y --no-install-recommends slurm-wlm munge || { apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge; }
}

start() {
  local at; at=$(realpath -m "$1"); mkdir -p "$at"/{state,spool-n1,spool-n2,log,munge}; chmod 755 "$at"
  local cores; cores=$(nproc)
  # munge: the daemons know each other by a key; a socket and a key of our own leave the system's alone.
  dd if=/dev/urandom of="$at/munge/key" bs=128 count=1 status=none
  chmod 700 "$at/munge"; chmod 600 "$at/munge/key"
  munged --force --socket="$at/munge/socket" --key-file="$at/munge/key" --pid-file="$at/munge/pid" \
    --log-file="$at/munge/log" --seed-file="$at/munge/seed"
  cat > "$at/slurm.conf" <<CONF
ClusterName=here
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$at/munge/socket
CryptoType=crypto/munge
SlurmctldPort=${SLURM_HERE_PORT:-16817}
StateSaveLocation=$at/state
SlurmdSpoolDir=$at/spool-%n
SlurmctldPidFile=$at/slurmctld.pid
SlurmdPidFile=$at/slurmd-%n.pid
SlurmctldLogFile=$at/log/slurmctld.log
SlurmdLogFile=$at/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MinJobAge=300
KillWait=20
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=16821 CPUs=$cores RealMemory=4096
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=16822 CPUs=$cores RealMemory=4096
PartitionName=here Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
  export SLURM_CONF="$at/slurm.conf"
  slurmctld -c
  slurmd -N n1
  slurmd -N n2
  for _ in $(seq 60); do
    [ "$(sinfo --noheader --Node --states=idle --format=%N | wc -l)" = 2 ] && { echo "export SLURM_CONF=$at/slurm.conf"; return; }
    sleep 0.5
  done
  echo "the nodes did not come up; see $at/log" >&2; tail -5 "$at"/log/* >&2; exit 1
}

stop() {
  local at; at=$(realpath "$1")
  export SLURM_CONF="$at/slurm.conf"
  # Jobs outlive their daemons.
  scancel --user="$(id -un)" --signal=KILL --full 2>/dev/null || true
  scancel --user="$(id -un)" 2>/dev/null || true
  for _ in $(seq 40); do [ -z "$(squeue --noheader 2>/dev/null)" ] && break; sleep 0.5; done
  for file in "$at"/slurmd-n1.pid "$at"/slurmd-n2.pid "$at"/slurmctld.pid "$at"/munge/pid; do
    [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null || true
  done
}

case "${1:-}" in
  install) install ;;
  start) start "$2" ;;
  stop) stop "$2" ;;
  *) sed -n '2,6p' "$0"; exit 2 ;;
esac
