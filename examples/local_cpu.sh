#!/usr/bin/env bash
# A small GPT on this machine's CPUs: 4 ranks on 2 virtual nodes and a spare node.
# Uses the first text file or folder given, else this repository's README.
#   examples/local_cpu.sh [TEXT]
# Watch it survive: while it trains, kill the process group of node 1, or add
#   --deadpool-inject kill-node=1@iteration=20,phase=backward
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TEXT=${1:-$ROOT/README.md}
OUT=${OUT:-local-cpu-out}
PYTHON=${PYTHON:-python}

"$PYTHON" "$ROOT/tools/preprocess_data.py" \
    --input "$TEXT" --input-format text --output-prefix "$OUT/data/corpus" \
    --tokenizer-type ByteTokenizer --append-eod

"$PYTHON" -m deadpool launch --nodes 3 --ranks-per-node 2 --spare-nodes 1 "$ROOT/pretrain_gpt.py" \
    --deadpool --deadpool-log-dir "$OUT/logs" \
    --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --use-distributed-optimizer \
    --num-layers 4 --hidden-size 96 --num-attention-heads 4 \
    --seq-length 128 --max-position-embeddings 128 \
    --micro-batch-size 4 --global-batch-size 16 --train-iters "${TRAIN_ITERS:-100}" \
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 4 \
    --weight-decay 0.1 --clip-grad 1.0 \
    --tokenizer-type ByteTokenizer --data-path "$OUT/data/corpus_text_document" --split 100,0,0 \
    --data-cache-path "$OUT/data/cache" --eval-iters 0 --log-interval 1
