"""Megatron-LM 0.16.1's flags that this driver does not support, and what to do instead.

Names and defaults are Megatron-LM's. A flag typed with the value it has anyway changes nothing
and passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A group of flags refused for one reason."""

    reason: str
    instead: str
    """What to type or do instead."""
    flags: str
    """`--flag` is refused whenever typed; `--flag=text` passes when its value is `text`."""

    def entries(self) -> Iterator[tuple[str, str | None]]:
        """(flag, the value that passes or None; several stand apart by commas)."""
        for entry in self.flags.split():
            name, separator, harmless = entry.partition("=")
            yield name, harmless if separator else None


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        reason="reinforcement learning is not part of this driver",
        instead="leave it out; for RL use Megatron-LM's train_rl.py",
        flags="""
        --perform-rl-step --rl-prompts-per-eval=32 --grpo-prompts-per-step=32
        --grpo-group-size=2 --grpo-iterations=2 --grpo-clamp-eps-lower=0.01
        --grpo-clamp-eps-upper=0.01 --grpo-kl-beta=0.001 --grpo-entropy-term-weight=0.0
        --grpo-filter-groups-with-same-reward
        --langrl-inference-server-type=inplace_megatron
        --langrl-inference-server-conversation-template --langrl-external-server
        --no-langrl-external-server= --langrl-env-config --rl-default-temperature=1.0
        --rl-default-top-p=0 --rl-default-top-k=-1
        --rl-offload-optimizer-during-inference --rl-offload-kv-cache-during-training
        --no-rl-offload-kv-cache-during-training= --rl-remove-kv-cache-during-training
        --no-rl-remove-kv-cache-during-training= --rl-reset-cuda-graphs
        --no-rl-reset-cuda-graphs= --rl-partial-rollouts --no-rl-partial-rollouts=
        --rl-inference-logprobs-is-correction --no-rl-inference-logprobs-is-correction=
        --rl-importance-sampling-truncation-coef --rl-use-sequence-packing
        --no-rl-use-sequence-packing= --rl-sequence-packing-max-sequences-per-bin=50
        --rl-sequence-packing-algo=fifo --rl-training-cuda-graphs
        --no-rl-training-cuda-graphs= --rl-inference-tensor-model-parallel-size
        --rl-inference-pipeline-model-parallel-size
        --rl-inference-expert-model-parallel-size
        --rl-inference-expert-tensor-model-parallel-size
        --rl-inference-model-unified-memory-level=0
        --rl-offload-inference-model-weights-when-idle
        --no-rl-offload-inference-model-weights-when-idle= --refit-method=gloo
        --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap=
        --rl-parallel-generation-tasks=512 --rl-skip-bos-token --no-rl-skip-bos-token=
        """,
    ),
    Refusal(
        reason="inference is not part of this driver",
        instead="leave it out; load the checkpoint with megatron-core's inference engines",
        flags="""
        --inference-batch-times-seqlen-threshold=-1 --max-tokens-to-oom=12000
        --output-bert-embeddings --bert-embedder-type=megatron
        --use-legacy-static-engine --inference-max-requests=8
        --inference-max-seq-length=2560 --inference-max-batch-size
        --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb=40.0
        --inference-dynamic-batching-paused-buffer-size-gb
        --inference-dynamic-batching-block-size=256
        --inference-dynamic-batching-max-requests
        --inference-dynamic-batching-max-tokens
        --inference-dynamic-batching-num-cuda-graphs=16
        --inference-dynamic-batching-track-paused-request-events
        --decode-only-cuda-graphs --inference-dynamic-batching-unified-memory-level=0
        --nccl-all-reduce-for-prefill --enable-chunked-prefill --disable-chunked-prefill
        --inference-dynamic-batching-cuda-graph-max-tokens=16384
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count=16
        --inference-logging-step-interval=0 --inference-wandb-logging
        --no-inference-wandb-logging= --inference-coordinator-port=12346 --flash-decode
        --batch-invariant-mode --symmetric-ar-type --inference-fuse-tp-communication
        --inference-rng-tracker --mlp-chunks-for-prefill=1
        --moe-pad-experts-for-cuda-graph-inference --moe-enable-routing-replay
        """,
    ),
    Refusal(
        reason="CUDA graphs record process groups, which a repair replaces",
        instead="leave it out, or type --cuda-graph-impl none",
        flags="""
        --enable-cuda-graph --external-cuda-graph --cuda-graph-impl=none
        --cuda-graph-scope --cuda-graph-warmup-steps=3
        """,
    ),
    Refusal(
        reason="this driver trains GPT alone: no vision models",
        instead="leave it out; use Megatron-LM's pretrain_vision_classify.py",
        flags="""
        --num-classes=1000 --img-h=224 --img-w=224 --num-channels=3 --patch-dim=16
        --classes-fraction=1.0 --data-per-class-fraction=1.0
        --head-lr-mult=1.0 --vision-pretraining --vision-pretraining-type=classify
        --vision-backbone-type=vit --swin-backbone-type=tiny --mask-type=random
        --mask-factor=1.0 --iter-per-epoch=1250 --dino-local-img-size=96
        --dino-local-crops-number=10 --dino-head-hidden-size=2048
        --dino-bottleneck-size=256 --dino-freeze-last-layer=1 --dino-norm-last-layer
        --dino-warmup-teacher-temp=0.04 --dino-teacher-temp=0.07
        --dino-warmup-teacher-temp-epochs=30
        """,
    ),
    Refusal(
        reason="this driver trains GPT alone: no BERT, T5, ICT or retrieval models",
        instead="leave it out; a GPT's depth and length are --num-layers and --seq-length",
        flags="""
        --ict-head-size --biencoder-projection-dim=0
        --biencoder-shared-query-context-model --ict-load --bert-load --titles-data-path
        --query-in-block-prob=0.1 --use-one-sent-docs --evidence-data-path
        --retriever-report-topk-accuracies --retriever-score-scaling --block-data-path
        --embedding-path --indexer-batch-size=128 --indexer-log-interval=1000
        --encoder-num-layers --decoder-num-layers --encoder-seq-length
        --decoder-seq-length --bert-no-binary-head --mask-prob=0.15 --short-seq-prob=0.1
        --sample-rate=1.0 --relative-attention-num-buckets=32
        --relative-attention-max-distance=128
        """,
    ),
    Refusal(
        reason="multi-latent attention is not supported",
        instead="use multi-head or grouped attention: --group-query-attention --num-query-groups N",
        flags="""
        --q-lora-rank --kv-lora-rank=32 --qk-head-dim=128 --qk-pos-emb-head-dim=64
        --v-head-dim=128 --rotary-scaling-factor=1.0 --mscale=1.0 --mscale-all-dim=0.0
        --cache-mla-latents --multi-latent-attention
        """,
    ),
    Refusal(
        reason="experimental attention variants are not supported",
        instead="leave it out, and use standard attention",
        flags="""
        --linear-attention-freq --experimental-attention-variant --dsa-indexer-n-heads
        --dsa-indexer-head-dim --dsa-indexer-topk --dsa-indexer-loss-coeff
        --dsa-indexer-use-sparse-loss --linear-conv-kernel-dim=4
        --linear-key-head-dim=128 --linear-value-head-dim=128 --linear-num-key-heads=16
        --linear-num-value-heads=32 --qk-clip --qk-clip-alpha=0.5
        --qk-clip-threshold=100 --log-max-attention-logit
        """,
    ),
    Refusal(
        reason="Mamba and hybrid models are not supported",
        instead="leave it out; the model is a GPT of --num-layers equal layers",
        flags="""
        --is-hybrid-model --mamba-state-dim=128 --mamba-head-dim=64 --mamba-num-groups=8
        --mamba-num-heads --disable-mamba-mem-eff-path --hybrid-attention-ratio=0.0
        --hybrid-mlp-ratio=0.0 --hybrid-override-pattern
        """,
    ),
    Refusal(
        reason="multi-token prediction is not supported",
        instead="leave it out",
        flags="""
        --mtp-num-layers --mtp-loss-scaling-factor=0.1 --mtp-standalone
        """,
    ),
    Refusal(
        reason="layers are chosen by flags here, not by a specification or configuration file",
        instead="describe the model by flags: --num-layers, --hidden-size, --num-experts and so on",
        flags="""
        --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json
        --spec --yaml-cfg --enable-experimental --te-precision-config-file
        --fp8-quantizer-factory --fp4-quantizer-factory
        """,
    ),
    Refusal(
        reason="low-precision kernels from Kitchen are not supported",
        instead="leave it out, or use --fp8-format with Transformer Engine",
        flags="""
        --use-kitchen-attention --kitchen-attention-backend=sdpa --kitchen-config-file
        --kitchen-recipe-number
        """,
    ),
    Refusal(
        reason="parameters kept in fp8 or fp4 are not supported",
        instead="use --fp8-format or --fp4-format alone, with parameters in bf16",
        flags="""
        --fp8-param-gather --fp4-param-gather --reuse-grad-buf-for-mxfp8-param-ag
        --keep-fp8-transpose-cache
        """,
    ),
    Refusal(
        reason="fully sharded data parallel is not supported",
        instead="use --use-distributed-optimizer",
        flags="""
        --use-megatron-fsdp --data-parallel-sharding-strategy=no_shard
        --outer-dp-sharding-strategy=no_shard --no-gradient-reduce-div-fusion
        --fsdp-double-buffer --suggested-communication-unit-size
        --enable-full-sharding-in-hsdp --use-torch-fsdp2
        --torch-fsdp2-no-reshard-after-forward --fsdp-manual-registration
        --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
        --init-model-with-meta-device
        """,
    ),
    Refusal(
        reason="process groups are made in one fixed way, so that they can be repaired",
        instead="leave it out",
        flags="""
        --use-nccl-ub --disable-symmetric-registration --use-sharp --sharp-enabled-group
        --create-all-gather-group --nccl-communicator-config-path
        --high-priority-stream-groups --pipeline-model-parallel-comm-backend
        --num-distributed-optimizer-instances=1
        --fake-process-group --lazy-mpu-init --use-ring-exchange-p2p
        --distributed-timeout-seconds-after-init
        """,
    ),
    Refusal(
        reason="this form of context parallelism is not supported",
        instead="use --context-parallel-size alone, with --cp-comm-type p2p, a2a or all_gather",
        flags="""
        --hierarchical-context-parallel-sizes --hybrid-context-parallel
        --max-seqlen-per-dp-cp-rank
        """,
    ),
    Refusal(
        reason="the expert communication schedule is not supported",
        instead="leave it out; --moe-token-dispatcher-type alltoall is supported",
        flags="""
        --overlap-moe-expert-parallel-comm --delay-wgrad-compute
        --ep-overlap-early-attn-memory-release --moe-enable-deepep
        --moe-flex-dispatcher-backend=deepep --moe-deepep-num-sms=20
        --moe-hybridep-num-sms=16 --moe-extended-tp
        """,
    ),
    Refusal(
        reason="upcycling a dense model is not supported",
        instead="upcycle with Megatron-LM and --load the result",
        flags="""
        --moe-use-upcycling --moe-upcycling-granularity=1
        """,
    ),
    Refusal(
        reason="this grouped GEMM is deprecated in megatron-core",
        instead="use --moe-grouped-gemm",
        flags="""
        --moe-use-legacy-grouped-gemm
        """,
    ),
    Refusal(
        reason="moving state to host memory during training is not supported",
        instead="leave it out; --recompute-granularity saves device memory",
        flags="""
        --cpu-offloading-num-layers=0 --fine-grained-activation-offloading
        --offload-modules --min-offloaded-tensor-size=1048576 --optimizer-cpu-offload
        --optimizer-offload-fraction=1.0 --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params
        """,
    ),
    Refusal(
        reason="the Muon optimizer is not supported",
        instead="use --optimizer adam or sgd",
        flags="""
        --muon-momentum=0.9 --muon-no-split-qkv --muon-use-nesterov
        --muon-scale-mode=spectral --muon-fp32-matmul-prec=medium --muon-num-ns-steps=5
        --muon-tp-mode=blockwise --muon-extra-scale-factor=1.0
        """,
    ),
    Refusal(
        reason="Megatron-LM itself refuses it with torch_dist checkpoints, the only format here",
        instead="leave it out; --overlap-param-gather is supported",
        flags="""
        --overlap-param-gather-with-optimizer-step
        """,
    ),
    Refusal(
        reason="profiling is not built in",
        instead="run the script under nsys, or torch.profiler around it",
        flags="""
        --profile --profile-step-start=10 --profile-step-end=12 --use-pytorch-profiler
        --profile-ranks=0 --record-memory-history --memory-snapshot-path=snapshot.pickle
        """,
    ),
    Refusal(
        reason="Weights & Biases is not supported",
        instead="use --tensorboard-dir; wandb can sync TensorBoard folders",
        flags="""
        --wandb-project --wandb-exp-name --wandb-save-dir --wandb-entity
        """,
    ),
    Refusal(
        reason="this monitor belongs to NVIDIA's clusters or to a package outside PyPI",
        instead="leave it out",
        flags="""
        --adlr-autoresume --adlr-autoresume-interval=1000 --log-straggler
        --straggler-ctrlr-port=65535 --straggler-minmax-count=1
        --disable-straggler-on-startup --run-workload-inspector-server --no-one-logger
        --one-logger-project=megatron-lm --one-logger-run-name --one-logger-async
        --app-tag-run-name --app-tag-run-version=0.0.0 --log-energy
        """,
    ),
    Refusal(
        reason="fault tolerance here is deadpool's own",
        instead="use --deadpool and its flags",
        flags="""
        --inprocess-restart --inprocess-max-iterations
        --inprocess-monitor-thread-interval=1.0 --inprocess-monitor-process-interval=1.0
        --inprocess-progress-watchdog-interval=1.0 --inprocess-heartbeat-interval=30
        --inprocess-soft-timeout=60 --inprocess-hard-timeout=90
        --inprocess-heartbeat-timeout=60 --inprocess-barrier-timeout=120
        --inprocess-completion-timeout=120 --inprocess-last-call-wait=1
        --inprocess-termination-grace-time=1 --inprocess-granularity=node
        --inprocess-active-world-size=1 --inprocess-empty-cuda-cache --enable-ft-package
        --calc-ft-timeouts --ft-num-warmup-iters=5 --replication --replication-jump
        --replication-factor=2 --non-persistent-save-interval --non-persistent-ckpt-type
        --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir
        --non-persistent-local-ckpt-algo=fully_parallel
        """,
    ),
    Refusal(
        reason="the rerun machine, which looks for wrong results, is not part of this driver",
        instead="leave it out",
        flags="""
        --error-injection-rate=0 --error-injection-type=transient_error
        --rerun-mode=validate_results,disabled --check-for-spiky-loss
        --result-rejected-tracker-filename
        """,
    ),
    Refusal(
        reason="checkpoints are written while training waits",
        instead="leave it out; deadpool's snapshots are the ones that cost no time",
        flags="""
        --async-save --use-persistent-ckpt-worker
        """,
    ),
    Refusal(
        reason="checkpoints are in megatron-core's torch_dist format alone",
        instead="leave it out; convert other formats with Megatron-LM's tools first",
        flags="""
        --auto-detect-ckpt-format --ckpt-convert-format --ckpt-convert-save
        --ckpt-convert-update-legacy-dist-opt-format --dist-ckpt-save-pre-mcore-014
        --dist-ckpt-optim-fully-reshardable
        --distrib-optim-fully-reshardable-mem-efficient
        """,
    ),
    Refusal(
        reason="only a checkpoint's model and training state are loaded",
        instead="use --load, with --finetune to start anew from its weights",
        flags="""
        --pretrained-checkpoint --load-main-params-from-ckpt
        --use-mp-args-from-checkpoint-args
        """,
    ),
    Refusal(
        reason="gradients are not saved to files",
        instead="leave it out",
        flags="""
        --save-wgrads-interval --save-dgrads-interval
        """,
    ),
    Refusal(
        reason="remote storage is not supported",
        instead="copy the data to a file system first",
        flags="""
        --disable-msc --object-storage-cache-path

        """,
    ),
    Refusal(
        reason="fill-in-the-middle data is not supported",
        instead="prepare such documents beforehand with tools/preprocess_data.py",
        flags="""
        --fim-data --fim-rate=0.5 --fim-spm-rate=0.5 --fim-split-sample
        --fim-fragment-rate --fim-no-prefix --fim-prefix-token=<fim_prefix>
        --fim-middle-token=<fim_middle> --fim-suffix-token=<fim_suffix>
        --fim-pad-token=<fim_pad> --fim-eod-token=<|endoftext|>
        """,
    ),
    Refusal(
        reason="this diagnostic is not part of the driver",
        instead="leave it out",
        flags="""
        --dump-param-to-param-group-map --exit-signal-handler-for-dataloader
        """,
    ),
    Refusal(
        reason="its buffers bypass the process groups, which a repair replaces",
        instead="leave it out",
        flags="""
        --tp-comm-overlap --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad
        --tp-comm-bootstrap-backend=nccl --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad
        --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag
        --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs
        --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs
        --disable-tp-comm-split-rs
        """,
    ),
    Refusal(
        reason="this log is not written",
        instead="use --log-memory-to-tensorboard, and --log-interval for progress",
        flags="""
        --log-progress --log-memory-interval --log-device-memory-used
        """,
    ),
    Refusal(
        reason="every checkpoint is planned afresh, so that a repaired job saves rightly",
        instead="leave it out",
        flags="""
        --ckpt-assume-constant-structure
        """,
    ),
    Refusal(
        reason="training in several data phases is not supported",
        instead="train one phase after the other, with --load and another --data-path",
        flags="""
        --phase-transition-iterations
        """,
    ),
    Refusal(
        reason="one validation set is evaluated, for --eval-iters iterations",
        instead="use --valid-data-path and --eval-iters",
        flags="""
        --full-validation --multiple-validation-sets --test-mode
        """,
    ),
    Refusal(
        reason="supervised fine-tuning is not part of this driver",
        instead="leave it out; --finetune starts pretraining from a checkpoint's weights",
        flags="""
        --sft --sft-tokenizer-prompt-format=nemotron-h-aligned
        """,
    ),
    Refusal(
        reason="this tokenizer setting is not supported",
        instead="use --tokenizer-type HuggingFaceTokenizer with a --tokenizer-model folder",
        flags="""
        --tokenizer-metadata --tiktoken-pattern --tiktoken-num-special-tokens=1000
        --tiktoken-special-tokens
        """,
    ),
    Refusal(
        reason="the models of megatron.legacy are not supported",
        instead="leave it out: megatron-core's models are always used",
        flags="""
        --use-legacy-models --openai-gelu --onnx-safe
        --no-scatter-gather-tensors-in-pipeline --use-flash-attn
        """,
    ),
    Refusal(
        reason="Megatron-LM's GPT takes no notice of it",
        instead="use --use-rope-scaling, whose factor is 8",
        flags="""
        --rotary-seq-len-interpolation-factor --rope-scaling-factor=8.0
        """,
    ),
    Refusal(
        reason="vision rotary positions are not supported",
        instead="use --position-embedding-type rope",
        flags="""
        --mrope-section
        """,
    ),
    Refusal(
        reason="Megatron-LM has removed it",
        instead="use --micro-batch-size",
        flags="""
        --batch-size
        """,
    ),
    Refusal(
        reason="Megatron-LM has removed it",
        instead="use --tensor-model-parallel-size",
        flags="""
        --model-parallel-size
        """,
    ),
    Refusal(
        reason="Megatron-LM has removed it",
        instead="use --lr-warmup-fraction",
        flags="""
        --warmup
        """,
    ),
    Refusal(
        reason="Megatron-LM has removed it",
        instead="use --recompute-activations",
        flags="""
        --checkpoint-activations
        """,
    ),
    Refusal(
        reason="model export and quantization (ModelOpt) are not part of this driver",
        instead="leave it out",
        flags="""
        --export-model-type=GPTModel --export-legacy-megatron --export-te-mcore-model
        --export-force-local-attention --export-kv-cache-quant=none
        --export-real-quant-cfg=None --export-quant-cfg --export-kd-teacher-load
        --export-kd-teacher-model-config --export-kd-teacher-ckpt-format --export-kd-cfg
        --finetune-hf-dataset --finetune-data-split=train --export-qk-l2-norm
        --export-moe-apply-probs-on-input --export-offline-model --modelopt-enabled
        --enable-gpt-oss
        """,
    ),
)
