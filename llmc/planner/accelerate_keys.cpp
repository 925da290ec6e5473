#include <array>

#include "llmc/planner/foreign_keys.h"

namespace llmc {

namespace {

using enum KeyAs;

// Why a key is ignored.
constexpr std::string_view launch = "the command of the run starts its processes",
                           code = "it is part of their program", units = "each layer is gathered by itself",
                           files = "checkpoints have one format here",
                           loading = "each process reads its own part of the weights",
                           training = "there is no such training here",
                           context = "there is no context parallelism here",
                           amax = "products in 8 bits are scaled as --fp8 delayed says",
                           batches = "--micro-batch-size and --global-batch-tokens divide the batch";

constexpr std::array formats = {KeyChoice{"no", "fp32"}, KeyChoice{"false", "fp32"},
                                KeyChoice{"fp16", "fp16"}, KeyChoice{"bf16", "bf16"},
                                KeyChoice{"fp8", "bf16"}};
constexpr std::array formats_of_products = {KeyChoice{"no", ""}, KeyChoice{"false", ""},
                                            KeyChoice{"fp16", ""}, KeyChoice{"bf16", ""},
                                            KeyChoice{"fp8", "delayed"}};
constexpr std::array cpu = {KeyChoice{"true", "cpu"}, KeyChoice{"false", ""}};
constexpr std::array block = {KeyChoice{"true", "block"}, KeyChoice{"false", ""}};
constexpr std::array selective = {KeyChoice{"true", "selective"}, KeyChoice{"false", ""}};
constexpr std::array stage_one = {KeyChoice{"true", "1"}, KeyChoice{"false", ""}};
constexpr std::array tiers = {KeyChoice{"none", ""}, KeyChoice{"cpu", "cpu"}, KeyChoice{"nvme", "nvme"}};
// Their numbers are those of the enumeration of PyTorch.
constexpr std::array strategies = {
    KeyChoice{"FULL_SHARD", "FULL_SHARD"},
    KeyChoice{"1", "FULL_SHARD"},
    KeyChoice{"SHARD_GRAD_OP", "SHARD_GRAD_OP"},
    KeyChoice{"2", "SHARD_GRAD_OP"},
    KeyChoice{"NO_SHARD", "NO_SHARD"},
    KeyChoice{"3", "NO_SHARD"},
    KeyChoice{"HYBRID_SHARD", "HYBRID_SHARD"},
    KeyChoice{"4", "HYBRID_SHARD"},
    KeyChoice{"HYBRID_SHARD_ZERO2", "!--zero-stage 2 with --zero-shard-size is the same"},
    KeyChoice{"5", "!--zero-stage 2 with --zero-shard-size is the same"}};
constexpr std::array resharding = {
    KeyChoice{"true", "FULL_SHARD"},
    KeyChoice{"false", "FULL_SHARD"},
    KeyChoice{"FULL_SHARD", "FULL_SHARD"},
    KeyChoice{"SHARD_GRAD_OP", "SHARD_GRAD_OP"},
    KeyChoice{"NO_SHARD", "NO_SHARD"},
    KeyChoice{"HYBRID_SHARD", "HYBRID_SHARD"},
    KeyChoice{"HYBRID_SHARD_ZERO2", "!--zero-stage 2 with --zero-shard-size is the same"}};
constexpr std::array kept_after_forward = {KeyChoice{"true", ""},
                                           KeyChoice{"false", "false"},
                                           KeyChoice{"FULL_SHARD", ""},
                                           KeyChoice{"SHARD_GRAD_OP", ""},
                                           KeyChoice{"NO_SHARD", ""},
                                           KeyChoice{"HYBRID_SHARD", ""},
                                           KeyChoice{"HYBRID_SHARD_ZERO2", ""}};

constexpr std::array keys = {
    ForeignKey{"num_processes", whole, "gpus", "-1"}, ForeignKey{"num_machines", whole, "nodes"},
    ForeignKey{"use_cpu", choice, "device", "", cpu},
    ForeignKey{"mixed_precision", choice, "dtype", "", formats},
    ForeignKey{"mixed_precision", choice, "fp8", "", formats_of_products},
    // DeepSpeed
    ForeignKey{"deepspeed_config.deepspeed_config_file", file, "", "none"},
    ForeignKey{"deepspeed_config.zero_stage", whole, "zero-stage"},
    ForeignKey{"deepspeed_config.offload_optimizer_device", choice, "offload-optimizer", "", tiers},
    ForeignKey{"deepspeed_config.offload_optimizer_nvme_path", text, "nvme-dir", "none"},
    ForeignKey{"deepspeed_config.offload_param_device", choice, "offload-parameters", "", tiers},
    ForeignKey{"deepspeed_config.offload_param_nvme_path", text, "nvme-dir", "none"},
    ForeignKey{"deepspeed_config.gradient_accumulation_steps", accumulation, ""},
    ForeignKey{"deepspeed_config.gradient_clipping", number, "grad-clip", "none"},
    ForeignKey{"deepspeed_config.zero3_init_flag", ignored, loading, "false"},
    ForeignKey{"deepspeed_config.zero3_save_16bit_model", ignored, files, "false"},
    ForeignKey{"deepspeed_config.seq_parallel_communication_data_type", ignored, context},
    ForeignKey{"deepspeed_config.deepspeed_moe_layer_cls_names", ignored, training},
    ForeignKey{"deepspeed_config.deepspeed_multinode_launcher", ignored, launch},
    ForeignKey{"deepspeed_config.deepspeed_hostfile", ignored, launch},
    ForeignKey{"deepspeed_config.deepspeed_exclusion_filter", ignored, launch},
    ForeignKey{"deepspeed_config.deepspeed_inclusion_filter", ignored, launch},
    // FSDP
    ForeignKey{"fsdp_config.fsdp_sharding_strategy", choice, "zero-stage", "", strategies},
    ForeignKey{"fsdp_config.fsdp_reshard_after_forward", choice, "zero-stage", "", resharding},
    ForeignKey{"fsdp_config.fsdp_reshard_after_forward", choice, "reshard-after-forward", "",
               kept_after_forward},
    ForeignKey{"fsdp_config.fsdp_offload_params", choice, "offload-parameters", "", cpu},
    ForeignKey{"fsdp_config.fsdp_offload_params", choice, "offload-optimizer", "", cpu},
    ForeignKey{"fsdp_config.fsdp_activation_checkpointing", choice, "recompute", "", block},
    ForeignKey{"fsdp_config.fsdp_version", ignored, code, "1|2"},
    ForeignKey{"fsdp_config.fsdp_backward_prefetch", ignored,
               "--prefetch-units says how far ahead parameters are gathered", "BACKWARD_PRE"},
    ForeignKey{"fsdp_config.fsdp_backward_prefetch_policy", ignored,
               "--prefetch-units says how far ahead parameters are gathered", "BACKWARD_PRE"},
    ForeignKey{"fsdp_config.fsdp_forward_prefetch", ignored,
               "--prefetch-units says how far ahead parameters are gathered", "true|false"},
    ForeignKey{"fsdp_config.fsdp_auto_wrap_policy", ignored, units, "TRANSFORMER_BASED_WRAP"},
    ForeignKey{"fsdp_config.fsdp_transformer_layer_cls_to_wrap", ignored, units},
    ForeignKey{"fsdp_config.fsdp_min_num_params", ignored, units},
    ForeignKey{"fsdp_config.fsdp_state_dict_type", ignored, files},
    ForeignKey{"fsdp_config.fsdp_cpu_ram_efficient_loading", ignored, loading, "true"},
    ForeignKey{"fsdp_config.fsdp_sync_module_states", ignored, loading, "true"},
    ForeignKey{"fsdp_config.fsdp_use_orig_params", ignored, code},
    ForeignKey{"fsdp_config.fsdp_ignored_modules", ignored, code},
    // Megatron-LM
    ForeignKey{"megatron_lm_config.megatron_lm_tp_degree", whole, "tensor-parallel"},
    ForeignKey{"megatron_lm_config.megatron_lm_pp_degree", whole, "pipeline-parallel"},
    ForeignKey{"megatron_lm_config.megatron_lm_num_micro_batches", accumulation, ""},
    ForeignKey{"megatron_lm_config.megatron_lm_sequence_parallelism", flag, "sequence-parallel", "false"},
    ForeignKey{"megatron_lm_config.megatron_lm_recompute_activations", choice, "recompute", "", selective},
    ForeignKey{"megatron_lm_config.megatron_lm_use_distributed_optimizer", choice, "zero-stage", "",
               stage_one},
    ForeignKey{"megatron_lm_config.megatron_lm_gradient_clipping", number, "grad-clip"},
    // Meshes
    ForeignKey{"parallelism_config.parallelism_config_tp_size", whole, "tensor-parallel"},
    ForeignKey{"parallelism_config.parallelism_config_dp_shard_size", whole, "zero-shard-size", "1"},
    ForeignKey{"parallelism_config.parallelism_config_dp_replicate_size", ignored,
               "the sharding groups are as many as --zero-shard-size leaves", "1"},
    ForeignKey{"parallelism_config.parallelism_config_cp_size", ignored, context, "1"},
    ForeignKey{"parallelism_config.parallelism_config_sp_size", ignored, context, "1"},
    ForeignKey{"parallelism_config.*", ignored, context},
    ForeignKey{"tp_config.tp_size", whole, "tensor-parallel"},
    ForeignKey{"fp8_config.amax_history_len", whole, "fp8-history"},
    ForeignKey{"fp8_config.amax_history_length", whole, "fp8-history"},
    ForeignKey{"fp8_config.*", ignored, amax},
    // What a run here has not, or has otherwise
    ForeignKey{"compute_environment", ignored, launch, "LOCAL_MACHINE"},
    ForeignKey{"distributed_type", ignored, training,
               "no|false|multi_cpu|multi_gpu|deepspeed|fsdp|megatron_lm|tp"},
    ForeignKey{"debug", ignored, code, "false"}, ForeignKey{"downcast_bf16", ignored, code, "no|false"},
    ForeignKey{"enable_cpu_affinity", ignored, "processes bind themselves to cores", "true|false"},
    ForeignKey{"split_batches", ignored, batches, "false"},
    ForeignKey{"dispatch_batches", ignored, batches, "false"},
    ForeignKey{"even_batches", ignored, batches, "true"}, ForeignKey{"gpu_ids", ignored, launch, "all"},
    ForeignKey{"machine_rank", ignored, launch, "0"}, ForeignKey{"main_process_ip", ignored, launch},
    ForeignKey{"main_process_port", ignored, launch},
    ForeignKey{"main_training_function", ignored, code, "main"},
    ForeignKey{"rdzv_backend", ignored, launch, "static"},
    ForeignKey{"same_network", ignored, launch, "true"}, ForeignKey{"mpirun_config.*", ignored, launch},
    ForeignKey{"dynamo_config.*", ignored, "kernels are compiled before a run"},
    ForeignKey{"dynamo_backend", ignored, "kernels are compiled before a run", "no|false"},
    ForeignKey{"ipex_config.*", ignored, code, "false"},
    ForeignKey{"tpu_use_cluster", ignored, training, "false"},
    ForeignKey{"tpu_use_sudo", ignored, training, "false"}, ForeignKey{"tpu_name", ignored, training},
    ForeignKey{"tpu_zone", ignored, training}, ForeignKey{"tpu_vm", ignored, training},
    ForeignKey{"tpu_env", ignored, training}, ForeignKey{"command_file", ignored, launch},
    ForeignKey{"commands", ignored, launch}};

}  // namespace

std::span<const ForeignKey> accelerate_keys() { return keys; }

}  // namespace llmc
