#!/usr/bin/env bash
# GPT-2 345M on the GPUs of one machine, as Megatron-LM's users start it.
#   DATA=data/corpus_text_document VOCAB=gpt2-vocab.json MERGES=gpt2-merges.txt \
#       examples/gpt2_torchrun.sh
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CUDA_DEVICE_MAX_CONNECTIONS=1

torchrun --nproc-per-node "${GPUS:-4}" "$ROOT/pretrain_gpt.py" \
    --tensor-model-parallel-size "${TENSOR:-1}" --pipeline-model-parallel-size "${PIPELINE:-1}" \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
    --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 4 --global-batch-size 64 --train-iters "${TRAIN_ITERS:-500000}" --bf16 \
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 320000 \
    --lr-warmup-fraction .01 --weight-decay 0.01 --clip-grad 1.0 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB" --merge-file "$MERGES" \
    --data-path "$DATA" --split 949,50,1 \
    --save "${CHECKPOINTS:-checkpoints}" --load "${CHECKPOINTS:-checkpoints}" --save-interval 1000 \
    --log-interval 100 --eval-interval 1000 --eval-iters 10
