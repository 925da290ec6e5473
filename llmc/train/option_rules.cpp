#include "llmc/parallel/pipeline/pipeline_partition.h"
#include "llmc/train/settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/tensor.h"
#include "llmc/parallel/mesh.h"
#include "llmc/train/adapter_options.h"
#include "llmc/train/folder_options.h"
#include "llmc/train/generate.h"
#include "llmc/train/loss_scale.h"
#include "llmc/train/precision.h"
#include "llmc/train/resume.h"

namespace llmc {

namespace {

constexpr std::int64_t default_batch = 24;  // sequences

Sharding asked_sharding(const Options& o) { return {.stage = static_cast<int>(o.zero_stage)}; }

template <class T>
DependentSetting dependent(std::string_view name, T Options::*member, std::string_view on,
                           std::string_view given, std::string_view purpose,
                           bool (*has_effect)(const Options&)) {
    return {.name = name,
            .on = on,
            .given = given,
            .purpose = purpose,
            .has_effect = has_effect,
            .differs_from_default = [member](const Options& o) { return o.*member != Options().*member; },
            .drop = [member](Options& o) { o.*member = Options().*member; }};
}

}  // namespace

std::vector<DependentSetting> dependent_settings() {
    const auto shards = [](const Options& o) { return !asked_sharding(o).keeps_optimizer_whole(); };
    const auto gathers = [](const Options& o) { return !asked_sharding(o).keeps_parameters_whole(); };
    const auto fetches = [](const Options& o) {
        return !asked_sharding(o).keeps_parameters_whole() || o.offload_parameters != "none";
    };
    const auto has_chunks = [](const Options& o) {
        return o.pipeline_parallel > 1 || o.kind_of_pipeline_schedule() == PipelineSchedule::breadth_first;
    };
    const auto shares_layers = [](const Options& o) { return o.tensor_parallel > 1; };
    const auto recomputes = [](const Options& o) { return o.recompute != "none"; };
    const auto exports = [](const Options& o) { return !o.export_file.empty(); };
    const auto evaluates = [](const Options& o) { return !o.eval_hellaswag.empty(); };
    const auto has_loss_scale = [](const Options& o) { return o.dtype == "fp16"; };
    const auto adapts = [](const Options& o) { return o.has_adapters(); };
    constexpr std::string_view needs_rank = "needs --lora-rank";
    constexpr std::string_view needs_fp16 = "needs --dtype fp16";
    constexpr std::string_view needs_evaluation = "needs --eval-hellaswag";
    constexpr std::string_view needs_gathering = "needs --zero-stage 3, which gathers parameters";
    constexpr std::string_view
        needs_stages = "needs --pipeline-parallel 2 or more",
        needs_chunks = "needs --pipeline-parallel 2 or more, or --pipeline-schedule breadth-first";
    return {
        dependent("zero-shard-size", &Options::zero_shard_size, "zero-stage", "zero-shard-size",
                  "needs --zero-stage 1, 2 or 3", shards),
        dependent("prefetch-units", &Options::prefetch_units, "zero-stage", "prefetch-units",
                  "needs --zero-stage 3 or --offload-parameters", fetches),
        dependent("reshard-after-forward", &Options::reshard_after_forward, "zero-stage",
                  "reshard-after-forward=false", needs_gathering, gathers),
        dependent("pipeline-schedule", &Options::pipeline_schedule, "pipeline-parallel", "pipeline-schedule",
                  needs_stages, has_chunks),
        dependent("virtual-stages", &Options::virtual_stages, "pipeline-parallel", "virtual-stages",
                  needs_chunks, has_chunks),
        dependent("pipeline-layers", &Options::pipeline_layers, "pipeline-parallel", "pipeline-layers",
                  needs_chunks, has_chunks),
        dependent("sequence-parallel", &Options::sequence_parallel, "tensor-parallel", "sequence-parallel",
                  "needs --tensor-parallel 2 or more", shares_layers),
        dependent("eval-every", &Options::eval_every, "eval-hellaswag", "eval-every", needs_evaluation,
                  evaluates),
        dependent("eval-examples", &Options::eval_examples, "eval-hellaswag", "eval-examples",
                  needs_evaluation, evaluates),
        dependent("export-dtype", &Options::export_dtype, "export", "export-dtype", "needs --export",
                  exports),
        dependent("merge", &Options::merge, "export", "merge", "needs --export", exports),
        dependent("lora-alpha", &Options::lora_alpha, "lora-rank", "lora-alpha", needs_rank, adapts),
        dependent("lora-rslora", &Options::lora_rslora, "lora-rank", "lora-rslora", needs_rank, adapts),
        dependent("base-dtype", &Options::base_dtype, "lora-rank", "base-dtype",
                  "needs --lora-rank or --lora", adapts),
        dependent("lora-layers", &Options::lora_layers, "lora-rank", "lora-layers", needs_rank, adapts),
        dependent("loss-scale", &Options::loss_scale, "dtype", "loss-scale", needs_fp16, has_loss_scale),
        dependent("initial-loss-scale", &Options::initial_loss_scale, "dtype", "initial-loss-scale",
                  needs_fp16, has_loss_scale),
        dependent("loss-scale-window", &Options::loss_scale_window, "dtype", "loss-scale-window", needs_fp16,
                  has_loss_scale),
        dependent("loss-scale-hysteresis", &Options::loss_scale_hysteresis, "dtype", "loss-scale-hysteresis",
                  needs_fp16, has_loss_scale),
        dependent("fp8-history", &Options::fp8_history, "fp8", "fp8-history", "needs --fp8 delayed",
                  [](const Options& o) { return o.fp8 == "delayed"; }),
        dependent(
            "nvme-dir", &Options::nvme_dir, "offload-optimizer", "nvme-dir",
            "needs --offload-optimizer nvme or --offload-parameters nvme",
            [](const Options& o) { return o.offload_optimizer == "nvme" || o.offload_parameters == "nvme"; }),
        dependent("recompute-every", &Options::recompute_every, "recompute", "recompute-every",
                  "needs --recompute selective or block", recomputes),
    };
}

ModelOptions unset_model_options() {
    ModelOptions unset;
    for (const FamilyOption& option : family_options()) {
        ModelOption value;
        if (option.kind == OptionKind::number) value = std::optional<double>();
        if (option.kind == OptionKind::text) value = std::optional<std::string>();
        if (option.kind == OptionKind::on_off) value = std::optional<bool>();
        unset.emplace(option.name, value);
    }
    return unset;
}

OptimizerOptions unset_optimizer_options() {
    OptimizerOptions unset;
    for (const HyperparameterOption& option : hyperparameter_options()) {
        OptimizerOption value;
        if (option.is_switch) value = std::optional<bool>();
        if (!option.choices.empty()) value = std::optional<std::string>();
        unset.emplace(option.name, value);
    }
    return unset;
}

namespace {

// Takes missing hyperparameters from the optimizer, and refuses those that it does not have.
void resolve_optimizer(Options& o) {
    const std::vector<Hyperparameter> numbers = all_numbers_of(o.optimizer_used());
    for (auto& [name, option] : o.optimizer_options) {
        const auto found = std::ranges::find(numbers, name, &Hyperparameter::name);
        std::visit(
            [&, &name = name]<class T>(std::optional<T>& value) {
                if (found == numbers.end()) {
                    if (value)
                        user_error(
                            "--{} is not an option of --optimizer {}; leave it out, or give --optimizer {}",
                            name, o.optimizer, fmt::join(optimizers_with(name), " or "));
                } else if constexpr (std::is_same_v<T, std::string>) {
                    value = value.value_or(
                        std::string(found->choices[static_cast<std::size_t>(found->default_value)]));
                } else {
                    value = value.value_or(static_cast<T>(found->default_value));
                }
            },
            option);
    }
    if (o.optimizer_used().others && o.moments_dtype == "8bit")
        user_error("--optimizer {} keeps moments in fp32 or bf16; give --moments-dtype bf16", o.optimizer);
    if (o.optimizer_used().others && o.offload_optimizer == "nvme")
        user_error("--optimizer {} keeps its state in memory; give --offload-optimizer cpu", o.optimizer);
}

// Takes missing values from the named model, and derives the other defaults from them.
void resolve(Options& o) {
    resolve_adapters(o);
    const ModelChoices defaults = choices_of(o.model);
    for (auto& [name, option] : o.model_options) {
        const auto found = defaults.values.find(name);
        std::visit(
            [&]<class T>(std::optional<T>& value) {
                if (found != defaults.values.end()) {
                    value = value.value_or(std::get<T>(found->second));
                } else if (value) {
                    user_error("--{} is not an option of --model {}; leave it out", name, o.model);
                }
            },
            option);
    }
    // Limits the sequence length so that the product below fits in 64 bits. The plan refuses longer sequences
    // later.
    constexpr std::int64_t longest = std::int64_t{1} << 40;
    o.global_batch_tokens =
        o.global_batch_tokens.value_or(default_batch * std::min(o.sequence_length(), longest));
    // A pretrained model is tuned more slowly than a new one is trained.
    constexpr double of_folder_weights = 3e-5, of_folder = 3e-4;
    // Adapters begin as zeros, and are few.
    constexpr double of_adapters = 3e-4;
    const double of_model = o.has_adapters() ? of_adapters
                            : !o.folder      ? named_model(o.model).learning_rate
                            : o.init.empty() ? of_folder
                                             : of_folder_weights;
    o.learning_rate = o.learning_rate.value_or(of_model * o.optimizer_used().learning_rate);
    o.weight_decay =
        o.weight_decay.value_or(o.has_adapters() ? 0.0 : default_weight_decay(o.optimizer_used()));
    resolve_optimizer(o);
    constexpr std::int64_t default_warmup = 100;
    const std::int64_t warmup = o.steps > 0 ? std::min(default_warmup, o.steps / 10) : default_warmup;
    o.warmup_steps = o.warmup_steps.value_or(o.schedule_kind() == ScheduleKind::constant ? 0 : warmup);
}

void check_ranges(const Options& o) {
    check_adapters(o);
    constexpr std::int64_t many = std::int64_t{1} << 40;
    constexpr double large = greatest_number;  // updates compute in fp32
    require_range<std::int64_t>("steps", o.steps, 0, many);
    if (o.micro_batch_size) require_range<std::int64_t>("micro-batch-size", *o.micro_batch_size, 1, many);
    // A configuration file holds signed 64-bit numbers.
    require_range<std::uint64_t>("seed", o.seed, 0, std::numeric_limits<std::int64_t>::max());
    for (const auto& [name, scale] :
         {std::pair("loss-scale", o.loss_scale), {"initial-loss-scale", o.initial_loss_scale}})
        if (scale && (*scale < 1 || *scale > most_loss_scale ||
                      !std::has_single_bit(static_cast<std::uint64_t>(*scale))))
            user_error("--{} {} is no power of two from 1 to 2^60; give another, such as 65536", name,
                       *scale);
    if (o.loss_scale &&
        (o.initial_loss_scale || o.is_given("loss-scale-window") || o.is_given("loss-scale-hysteresis")))
        user_error("--loss-scale fixes the scale, which --{} adapts; leave one of them out",
                   o.initial_loss_scale              ? "initial-loss-scale"
                   : o.is_given("loss-scale-window") ? "loss-scale-window"
                                                     : "loss-scale-hysteresis");
    require_range<std::int64_t>("loss-scale-window", o.loss_scale_window, 1, many);
    require_range<std::int64_t>("loss-scale-hysteresis", o.loss_scale_hysteresis, 1, many);
    require_range<std::int64_t>("fp8-history", o.fp8_history, 1, 1 << 16);
    require_range<std::int64_t>("comm-timeout", o.communication_timeout, 1, 1 << 20);
    require_range<std::int64_t>("zero-stage", o.zero_stage, 0, 3);
    require_range<std::int64_t>("check-replicas-every", o.check_replicas_every, 0, many);
    if (o.zero_shard_size) require_range<std::int64_t>("zero-shard-size", *o.zero_shard_size, 1, 1 << 20);
    if (o.prefetch_units) require_range<std::int64_t>("prefetch-units", *o.prefetch_units, 0, 1 << 20);
    require_range<std::int64_t>("pipeline-parallel", o.pipeline_parallel, 1, 1 << 10);
    require_range<std::int64_t>("tensor-parallel", o.tensor_parallel, 1, 1 << 10);
    if (o.virtual_stages) require_range<std::int64_t>("virtual-stages", *o.virtual_stages, 1, 1 << 10);
    for (const DependentSetting& setting : dependent_settings()) {
        if (setting.differs_from_default(o) && !setting.has_effect(o))
            user_error("--{} {}; leave it out", setting.given, setting.purpose);
    }
    if (o.pipeline_timeline && o.pipeline_parallel == 1)
        user_error("--pipeline-timeline needs --pipeline-parallel 2 or more; leave it out");
    const char* prints = nullptr;
    for (const auto& [is_asked, option] :
         {std::pair{o.given.contains("verify-checkpoint"), "--verify-checkpoint"},
          {o.print_model, "--print-model"},
          {o.pipeline_timeline, "--pipeline-timeline"},
          {o.print_step, "--print-step"}}) {
        if (!is_asked) continue;
        if (prints) user_error("{} and {} cannot be combined; leave one out", prints, option);
        prints = option;
    }
    for (const char* unused : {"metrics", "export", "init", "resume", "resume-if-any"}) {
        if (o.pipeline_timeline && o.steps == 0 && o.given.contains(unused))
            user_error("--{}: --pipeline-timeline with --steps 0 only draws; leave one of them out", unused);
    }
    if (o.recompute_every) {
        require_range<std::int64_t>("recompute-every", *o.recompute_every, 1,
                                    std::clamp<std::int64_t>(o.layers(), 1, many));
    }
    require_range("lr", *o.learning_rate, 0.0, large);
    require_range<std::int64_t>("warmup-steps", *o.warmup_steps, 0, many);
    require_range("min-lr-fraction", o.min_lr_fraction, 0.0, 1.0);
    require_range("weight-decay", *o.weight_decay, 0.0, large);
    for (const Hyperparameter& number : all_numbers_of(o.optimizer_used()))
        require_range(number.name.data(), o.value_of(number), number.lowest, number.highest);
    require_range("grad-clip", o.grad_clip, 0.0, large);
    require_range<std::int64_t>("val-every", o.val_every, 0, many);
    require_range<std::int64_t>("val-batches", o.val_batches, 0, many);
    require_range<std::int64_t>("eval-every", o.eval_every, 0, many);
    require_range<std::int64_t>("eval-examples", o.eval_examples, 0, many);
    require_range<std::int64_t>("sample-every", o.sample_every, 0, many);
    require_range<std::int64_t>("sample-tokens", o.sample_tokens, 0, 1 << 20);
    require_range("temperature", o.temperature, 0.0, large);
    require_range<std::int64_t>("top-k", o.top_k, 0, many);
    require_range("top-p", o.top_p, 0.0, 1.0);
    require_range<std::int64_t>("checkpoint-every", o.checkpoint_every, 0, many);
    require_range<std::int64_t>("keep-last", o.keep_last, 0, many);
    require_range<std::int64_t>("log-every", o.log_every, 1, many);
    if (o.overwrite && o.out_dir.empty())
        user_error("--overwrite needs --out-dir, the run to replace; leave it out");
    if (o.overwrite && o.steps == 0)
        user_error(
            "--overwrite replaces a run by a new one, and --steps 0 trains none; leave one of them out");
    if (o.keep_best && o.val_every == 0)
        user_error("--keep-best needs validations during training; give --val-every 1 or more");
    // An --eval-hellaswag from a configuration file is for that file's training, and is ignored here.
    if (o.steps == 0 && o.given.contains("eval-hellaswag") && !o.resume && o.init.empty()) {
        user_error(
            "--eval-hellaswag: with --steps 0 the weights would be random; give --resume, or --init with a "
            "file");
    }
}

// If --model names a folder, takes its architecture.
void take_model_folder(Options& o, const Sources& sources) {
    if (is_known_model(o.model)) return;
    if (!sources.model_folder)
        user_error(
            "--model: {} has no config.json of a folder in Hugging Face's format; give another folder, or "
            "the name of a model",
            o.model);
    o.model_folder = o.model;
    naming_option("--model", [&] { take_folder(o, *sources.model_folder); });
}

}  // namespace

void complete(Options& o, const Sources& sources) {
    o.out_dir = sources.out_dir;
    o.resume = sources.resume;
    o.takes_newest = sources.takes_newest;
    o.weights = sources.weights;
    o.notes.insert(o.notes.end(), sources.notes.begin(), sources.notes.end());
    take_precision(o);
    const bool goes_on = sources.checkpoint && !o.generate;
    if (sources.adapter) take_adapter(o, sources);
    if (goes_on) take_checkpoint(o, sources);
    // Another model that was asked for has its own architecture.
    if (sources.init_folder && !o.is_given("model"))
        naming_option("--init", [&] { take_folder(o, *sources.init_folder); });
    if (sources.init_checkpoint) naming_option("--init", [&] { take_model(o, *sources.init_checkpoint); });
    if (sources.init_checkpoint && o.has_adapters())
        o.init = o.weights;  // and not the newest of a run that goes on
    if (!goes_on) take_model_folder(o, sources);
    if (o.generate) settle_generation(o, sources);
    resolve(o);
    check_ranges(o);
    if (goes_on) require_same_model(*sources.checkpoint, o);
}

bool Options::plans_only() const { return print_model || print_step || (pipeline_timeline && steps == 0); }

bool Options::uses_weights() const {
    return steps > 0 || generate || (resume && !resume_if_any) || !init.empty() || !export_file.empty();
}

ModelChoices Options::choices_of_model() const {
    ModelChoices choices = choices_of(model);
    for (auto& [name, choice] : choices.values)
        std::visit([&](const auto& value) { choice = value.value(); }, model_options.find(name)->second);
    return choices;
}

Model Options::make_model() const {
    return adapted(llmc::make_model(family_of(model), choices_of_model()), *this);
}

DType Options::compute_dtype() const { return dtype_named(dtype.empty() ? "fp32" : dtype); }
DType Options::kept_gradient_dtype() const { return dtype_named(gradient_dtype); }
DType Options::kept_moments_dtype() const {
    return moments_dtype == "8bit" ? DType::uint8 : dtype_named(moments_dtype);
}

double Options::value_of(const Hyperparameter& number) const {
    return std::visit(
        [&]<class T>(const std::optional<T>& value) {
            if constexpr (std::is_same_v<T, std::string>) {
                return static_cast<double>(std::ranges::find(number.choices, *value) -
                                           number.choices.begin());
            } else {
                return static_cast<double>(value.value());
            }
        },
        optimizer_options.find(number.name)->second);
}

HyperparameterValues Options::numbers_of(const Optimizer& of) const {
    HyperparameterValues numbers{};
    std::ranges::transform(of.hyperparameters, numbers.begin(),
                           [&](const Hyperparameter& number) { return value_of(number); });
    return numbers;
}

StoreDtypes Options::store_dtypes() const {
    return {.compute = compute_dtype(),
            .gradients = kept_gradient_dtype(),
            .moments = kept_moments_dtype(),
            .has_master = master_dtype != "none",
            .optimizer = optimizer_used().kind};
}

Fp8Scaling Options::fp8_scaling() const {
    return fp8 == "delayed" ? Fp8Scaling::delayed : fp8 == "current" ? Fp8Scaling::current : Fp8Scaling::none;
}

ScheduleKind Options::schedule_kind() const {
    for (const auto kind :
         {ScheduleKind::cosine, ScheduleKind::linear, ScheduleKind::constant, ScheduleKind::wsd}) {
        if (schedule == name_of(kind)) return kind;
    }
    programming_error("an unchecked schedule");
}

Schedule schedule_of(const Options& options) {
    return {.kind = options.schedule_kind(),
            .peak = options.learning_rate.value(),
            .min_fraction = options.min_lr_fraction,
            .warmup_steps = options.warmup_steps.value(),
            .total_steps = options.steps};
}

Recompute Options::recomputation() const {
    for (const auto kind : {RecomputeKind::none, RecomputeKind::selective, RecomputeKind::block}) {
        if (recompute == name_of(kind)) return {.kind = kind, .every = recompute_every.value_or(1)};
    }
    programming_error("an unchecked kind of recompute");
}

Offload Options::offload() const {
    const bool is_gpu = device == "cuda";
    const auto tier = [&](std::string_view name) {
        return name == "nvme" ? Tier::disk : name == "cpu" && is_gpu ? Tier::host : Tier::device;
    };
    return {
        .state = tier(offload_optimizer), .parameters = tier(offload_parameters), .has_own_memory = is_gpu};
}

bool Options::saves_beside_training() const {
    const bool saves_on_the_way = keep_best || (checkpoint_every > 0 && checkpoint_every < steps);
    return checkpoint_async && saves_on_the_way && steps > 0 && !generate;
}

PipelineSchedule Options::kind_of_pipeline_schedule() const {
    for (const PipelineSchedule kind : all_pipeline_schedules) {
        if (pipeline_schedule == name_of(kind)) return kind;
    }
    return virtual_stages.value_or(1) > 1 ? PipelineSchedule::interleaved : PipelineSchedule::one_f_one_b;
}

int Options::chunks_of_stage() const {
    const PipelineSchedule passes = kind_of_pipeline_schedule();
    const std::int64_t default_chunks = passes == PipelineSchedule::breadth_first
                                            ? std::max<std::int64_t>(1, layers() / pipeline_parallel)
                                        : passes == PipelineSchedule::interleaved ? 2
                                                                                  : 1;
    return static_cast<int>(virtual_stages.value_or(default_chunks));
}

namespace {

constexpr std::string_view each_micro_batch = "micro-batch";

void check_shard_size(std::int64_t size, int processes, bool are_all) {
    if (processes % size == 0) return;
    std::vector<int> divisors;
    for (int d = 1; d <= processes; ++d) {
        if (processes % d == 0) divisors.push_back(d);
    }
    const int nearest = *std::ranges::min_element(divisors, {}, [&](int d) { return std::abs(d - size); });
    refuse({"the sharding group divides the data-parallel ranks", size, processes,
            fmt::format("--zero-shard-size {}", nearest)},
           "--zero-shard-size {} does not divide the {} {}process{}; try {}", size, processes,
           are_all ? "" : "data-parallel ", processes == 1 ? "" : "es", fmt::join(divisors, ", "));
}

// `processes` is the number of data-parallel ranks.
Sharding sharding_of(const Options& o, int processes) {
    const std::int64_t size = o.zero_shard_size.value_or(processes);
    check_shard_size(size, processes, o.pipeline_parallel * o.tensor_parallel == 1);
    Sharding sharding{.shards = processes};
    // A group of one process holds all shards, so nothing is sharded.
    if (const Sharding asked = asked_sharding(o); !asked.keeps_optimizer_whole() && size > 1) {
        sharding = asked;
        sharding.shards = static_cast<int>(size);
        sharding.replicas = processes / sharding.shards;
        sharding.reshards_after_forward = o.reshard_after_forward;
    }
    sharding.offload = o.offload();
    sharding.prefetch_units = static_cast<int>(o.prefetch_units.value_or(sharding.default_prefetch_units()));
    sharding.rounds_are_consecutive = o.kind_of_pipeline_schedule() == PipelineSchedule::breadth_first &&
                                      o.pipeline_parallel * o.chunks_of_stage() == o.layers();
    sharding.reduces_each_micro_batch = o.reduce_every.empty()
                                            ? sharding.reduces_each_micro_batch_by_default()
                                            : o.reduce_every == each_micro_batch;
    return sharding;
}

}  // namespace

Mesh Options::mesh(int processes, int rank) const {
    const Model model_here = make_model();
    const bool are_planned = plans_only() && processes == pipeline_parallel * tensor_parallel;
    // Another mesh would have other chunks.
    const bool has_chunk_for_each_layer =
        !virtual_stages && kind_of_pipeline_schedule() == PipelineSchedule::breadth_first;
    check_mesh_sizes({.processes = are_planned ? std::nullopt : std::optional<std::int64_t>(processes),
                      .pipeline = pipeline_parallel,
                      .virtual_stages = has_chunk_for_each_layer ? 1 : chunks_of_stage(),
                      .chunks_without_layers = chunks_without_layers(pipeline_layers),
                      .tensor = tensor_parallel,
                      .sequence_parallel = sequence_parallel,
                      .batch_sequences = global_batch_tokens.value_or(0) / sequence_length()},
                     model_here);
    Mesh mesh{.pipeline = static_cast<int>(pipeline_parallel),
              .tensor = static_cast<int>(tensor_parallel),
              .sequence_parallel = sequence_parallel,
              .rank = rank};
    const int of_stage = processes / mesh.pipeline;
    mesh.sharding = sharding_of(*this, of_stage / mesh.tensor);
    return mesh;
}

namespace {

// Whether two parts of the model share parameters, as the embedding and a tied head do. If these parts are on
// different stages, each of the stages holds a copy.
bool has_shared_units(const Model& model) {
    std::vector<bool> used;
    for (const Outline outline = outline_of(model); const Outline::OutlinedPart& part : outline.parts) {
        used.resize(outline.units.size());
        for (const int unit : part.units) {
            if (used[static_cast<std::size_t>(unit)]) return true;
            used[static_cast<std::size_t>(unit)] = true;
        }
    }
    return false;
}

}  // namespace

namespace {

void settle_machine(Options& o, int processes, int on_machine) {
    if (!o.shards_on_machine || o.zero_shard_size) return;
    const auto ranks = [&](int all) { return std::max<std::int64_t>(1, all / o.tensor_parallel); };
    const std::int64_t data_ranks = ranks(processes) / o.pipeline_parallel;
    o.zero_shard_size = std::gcd(std::max<std::int64_t>(1, data_ranks), ranks(on_machine));
}

void settle_batch(Options& o, int processes) {
    const std::int64_t replica_size = o.pipeline_parallel * o.tensor_parallel;
    if (o.generate || processes % replica_size != 0 || o.sequence_length() < 1) return;
    const std::int64_t sequences = *o.global_batch_tokens / o.sequence_length();
    // The interleaved schedule needs a multiple of the stages.
    const std::int64_t stages = o.chunks_of_stage() > 1 ? o.pipeline_parallel : 1;
    const auto group_of = [&](std::int64_t micro_batch) {
        return saturated_product(processes / replica_size * stages, micro_batch);
    };
    // The micro-batch of a run that goes on here may not fit this mesh.
    const bool was_elsewhere = o.inherited.contains("micro-batch-size") && o.micro_batch_size.value_or(0) > 0;
    if (was_elsewhere && sequences % group_of(*o.micro_batch_size) != 0) o.micro_batch_size.reset();
    if (o.was_chosen("global-batch-tokens")) return;
    const std::int64_t group = group_of(o.micro_batch_size.value_or(1));
    // The batch of a run that goes on here may have grown for another mesh.
    const std::int64_t base = sequences % group == 0 ? sequences : default_batch;
    const std::int64_t batch = base / group * group + (base % group == 0 ? 0 : group);
    const std::int64_t tokens = saturated_product(batch, o.sequence_length());
    // Larger batches are refused later, by the size that makes them so large.
    constexpr std::int64_t most = std::int64_t{1} << 40;
    if (batch == sequences || tokens > most) return;
    o.global_batch_tokens = tokens;
    o.notes.push_back(
        fmt::format("--global-batch-tokens is {} ({} sequences instead of {}), which the processes "
                    "share evenly",
                    *o.global_batch_tokens, batch, sequences));
}

void settle_mesh(Options& o, const Mesh& mesh) {
    if (o.generate) settle_batch_of_generation(o, mesh);
    if (!asked_sharding(o).keeps_optimizer_whole() && mesh.sharding.keeps_optimizer_whole()) {
        o.notes.push_back(fmt::format(
            "--zero-stage {} has no effect with {}", o.zero_stage,
            mesh.data_ranks() == 1
                ? fmt::format("one {}process", mesh.world() > mesh.data_ranks() ? "data-parallel " : "")
                : "--zero-shard-size 1"));
    }
    const bool alike =
        mesh.data_ranks() > 1 && (mesh.sharding.keeps_parameters_whole() || mesh.sharding.replicas > 1);
    if (o.check_replicas_every > 0 && !alike && mesh.tensor == 1 &&
        (mesh.pipeline == 1 || !has_shared_units(o.make_model()))) {
        o.notes.push_back(fmt::format("--check-replicas-every {} has nothing to compare: {}",
                                      o.check_replicas_every,
                                      mesh.world() == 1        ? "there is one process"
                                      : mesh.data_ranks() == 1 ? "the pipeline stages share no state"
                                                               : "--zero-stage 3 keeps no copies"));
    }
    if (o.reduce_every.empty()) {
        o.reduce_every = mesh.sharding.reduces_each_micro_batch ? each_micro_batch : "step";
    }
}

}  // namespace

Configuration configured(const Options& options, DeviceKind device, const JobPlace& place) {
    Configuration run{for_device(options, device), {}};
    settle_machine(run.options, place.processes, place.on_machine);
    settle_batch(run.options, place.processes);
    run.mesh = run.options.mesh(place.processes, place.rank);
    settle_mesh(run.options, run.mesh);
    return run;
}

}  // namespace llmc
