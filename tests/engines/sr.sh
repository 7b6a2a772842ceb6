PORT=$(python3 -c "import socket;s=socket.socket();s.bind(('',0));print(s.getsockname()[1])")
cd /tmp/w19/tests/engines
PYTHONPATH=.:..:../.. OMP_NUM_THREADS=1 timeout 285 /work/main/.venv/bin/python -m torch.distributed.run --nproc_per_node 2 --master_port $PORT scratch_retain.py "$@" 2>&1 | grep -v "^JAGG\|^W\|\*\*\*\|^  File\|^    "
