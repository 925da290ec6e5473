#include "llmc/planner/planned_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/host_communicator.h"
#include "llmc/comm/launcher.h"
#include "llmc/core/text.h"
#include "llmc/device/device.h"
#include "llmc/device/gpu_sizes.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/plan/micro_batches.h"
#include "llmc/plan/step_time.h"
#include "llmc/train/command_line.h"
#include "llmc/train/run_spec.h"

namespace llmc {

namespace {

constexpr double gib = 1 << 30;

// Sizes without the limits of the kernels.
class WithoutLimits final : public DeviceSizes {
  public:
    explicit WithoutLimits(const DeviceSizes& sizes) : sizes_(sizes) {}

    std::size_t workspace_bytes(const WorkspaceRequest& request) const override {
        return sizes_.workspace_bytes(request);
    }
    std::int64_t default_micro_batch_tokens() const override { return sizes_.default_micro_batch_tokens(); }
    std::int64_t default_logits_bytes() const override { return sizes_.default_logits_bytes(); }

  private:
    const DeviceSizes& sizes_;
};

// The sizes of the CPU device, which belong to a device.
class CpuSizes final : public DeviceSizes {
  public:
    explicit CpuSizes(int threads) : device_(make_cpu_device(threads)) {}

    std::size_t workspace_bytes(const WorkspaceRequest& request) const override {
        return device_->sizes().workspace_bytes(request);
    }
    std::int64_t default_micro_batch_tokens() const override {
        return device_->sizes().default_micro_batch_tokens();
    }
    std::int64_t default_logits_bytes() const override { return device_->sizes().default_logits_bytes(); }
    std::size_t available_memory() const { return device_->available_memory(); }

  private:
    std::unique_ptr<Device> device_;
};

int ceiling(std::int64_t n, std::int64_t size) { return static_cast<int>((n + size - 1) / size); }

// The GPU that the options name, with the values that they override; none: CPUs.
std::optional<GpuModel> chosen_gpu(const PlanOptions& asked, const Options& options,
                                   std::vector<std::string>& notes) {
    const bool describes = asked.gpu_gib || asked.gpu_tflops || asked.gpu_bandwidth;
    const bool is_cpu = options.device == "cpu";
    if (is_cpu && (describes || !asked.gpu.empty()))
        user_error("--device cpu: --{} describes a GPU; leave one of them out", !asked.gpu.empty() ? "gpu"
                                                                                : asked.gpu_gib ? "gpu-memory"
                                                                                : asked.gpu_tflops
                                                                                    ? "gpu-tflops"
                                                                                    : "gpu-bandwidth");
    const bool asks_for_gpus = asked.gpus || options.device == "cuda" || describes;
    if (is_cpu || (asked.gpu.empty() && !asks_for_gpus)) return std::nullopt;
    const std::string name = asked.gpu.empty() ? "H100" : asked.gpu;
    const GpuModel* const known = gpu_named(name);
    if (!known && !(asked.gpu_gib && asked.gpu_tflops && asked.gpu_bandwidth)) {
        std::vector<std::string_view> names;
        for (const GpuModel& gpu : known_gpus())
            if (names.empty() || names.back() != gpu.name) names.push_back(gpu.name);
        user_error(
            "--gpu {}: unknown GPU; choose one of: {}; or describe it by --gpu-memory, --gpu-tflops and "
            "--gpu-bandwidth",
            one_line(name), fmt::join(names, ", "));
    }
    GpuModel gpu = known ? *known : *gpu_named("H100");
    if (!known) {
        notes.push_back(
            fmt::format("{}: links, network and kernels are planned as those of an H100", one_line(name)));
        gpu.fp8 = gpu.fp32 = gpu.tf32 = 0;
        gpu.dollars_an_hour.reset();
    }
    if (asked.gpu.empty()) notes.emplace_back("--gpu was not given: planned for H100");
    if (asked.gpu_gib) gpu.gib = gpu.nominal_gb = *asked.gpu_gib;
    if (asked.network) gpu.network_gbs = *asked.network;
    if (asked.gpu_tflops) gpu.bf16 = 1e12 * *asked.gpu_tflops;
    if (asked.gpu_bandwidth) gpu.memory_gbs = *asked.gpu_bandwidth;
    if (asked.price) gpu.dollars_an_hour = asked.price;
    if (gpu.gib <= 1)
        user_error("--gpu {}: how much of its memory a process sees is not known; give it by --gpu-memory",
                   gpu.name);
    return gpu;
}

// The threads of a process that shares this machine's cores with others.
int threads_of_process(int ranks_of_node) {
    if (std::getenv("OMP_NUM_THREADS") != nullptr) return 0;
    const std::vector<CoreMask> masks(static_cast<std::size_t>(ranks_of_node), own_mask());
    return share_of_cores(masks, 0);
}

PlannedMachines machines_of(const PlanOptions& asked, const Options& options, int ranks,
                            std::vector<std::string>& notes) {
    PlannedMachines machines;
    machines.gpu = chosen_gpu(asked, options, notes);
    const int node = machines.gpu ? machines.gpu->node == 2 ? 8 : machines.gpu->node : ranks;
    machines.nodes = static_cast<int>(asked.nodes.value_or(ceiling(ranks, node)));
    if (machines.nodes > ranks)
        user_error("--nodes {} are more than the {}; give at most as many", machines.nodes,
                   plural(ranks, machines.gpu ? "GPU" : "process", machines.gpu ? "s" : "es"));
    machines.ranks_of_node = ceiling(ranks, machines.nodes);
    machines.host_bytes = asked.host_bytes.value_or(0);
    if (machines.gpu) {
        machines.sizes = std::make_unique<cuda::GpuSizes>(machines.gpu->chip);
        machines.usable = static_cast<std::size_t>((machines.gpu->gib - 1) * gib);
        return machines;
    }
    auto sizes = std::make_unique<CpuSizes>(threads_of_process(machines.ranks_of_node));
    if (machines.host_bytes == 0) machines.host_bytes = static_cast<double>(sizes->available_memory());
    machines.usable = static_cast<std::size_t>(machines.host_bytes / machines.ranks_of_node);
    machines.sizes = std::move(sizes);
    return machines;
}

// The words of a command line that belong to the run, without the planner's options and their values.
std::vector<std::string> words_of_run(const std::vector<std::string>& arguments) {
    const std::vector<std::string> planners = plan_option_names();
    std::vector<std::string> words;
    for (std::size_t i = 1; i < arguments.size(); ++i) {
        const std::string& word = arguments[i];
        const std::size_t equals = word.find('=');
        const std::string name = word.substr(0, equals);
        if (std::ranges::find(planners, name) == planners.end()) {
            words.push_back(word);
        } else if (name != "--json" && equals == std::string::npos) {
            ++i;  // its value
        }
    }
    return words;
}

// The command that starts the run: --processes on one machine, mpirun on several, Slurm's srun for more than mpirun is
// good for.
std::string command_of(const PlannedRun& run) {
    constexpr int most_of_mpirun = 1024;
    const int ranks = run.mesh->world(), nodes = run.machines.nodes, each = run.machines.ranks_of_node;
    const std::string program = shell_word(run.arguments.front());
    std::string text = program;
    if (ranks > most_of_mpirun) {
        text =
            fmt::format("srun --nodes {} --ntasks {} --ntasks-per-node {} {}", nodes, ranks, each, program);
    } else if (nodes > 1) {
        text = fmt::format("mpirun -np {} --map-by ppr:{}:node {}", ranks, each, program);
    } else if (ranks > 1) {
        text += fmt::format(" --{} {}", processes_option, ranks);
    }
    for (const std::string& word : words_of_run(run.arguments)) text.append(" ").append(shell_word(word));
    return text;
}

Verdict verdict_of(const PlannedRun& run) {
    const std::size_t bytes = run.needs->largest_memory();
    const auto on_node = static_cast<std::size_t>(run.machines.gpu ? 1 : run.machines.ranks_of_node);
    constexpr auto last = static_cast<std::size_t>(gib);
    if (run.machines.usable == 0) return Verdict::fits;
    if (bytes > run.machines.usable) return Verdict::does_not_fit;
    return bytes * on_node + last > run.machines.usable * on_node ? Verdict::tight : Verdict::fits;
}

// The makers' peaks.
StepRates peak_rates(const PlannedRun& run) {
    const GpuModel& gpu = *run.machines.gpu;
    const double flops = gpu.peak(run.spec->dtype, run.options.tf32);
    // Without a link of their own, GPUs of a machine exchange over PCIe.
    return {.products = flops,
            .attention = flops,
            .memory = 1e9 * gpu.memory_gbs,
            .node = {.bytes = 1e9 * (gpu.link_gbs > 0 ? gpu.link_gbs : gpu.pcie_gbs)},
            .network = {.bytes = 1e9 * gpu.network_gbs},
            .ranks_of_node = run.machines.ranks_of_node,
            .is_bound = true};
}

// The rates that benchmarks reach (ml-engineering's, of 2026): products of large matrices 271 of 312 TFLOP/s on A100
// and 794 of 989 on H100, FlashAttention-2's 155 and 330, rings 0.8 of NVLink, all-reduces over several machines 0.73
// of the network; NCCL's latencies.
StepRates measured_rates(const PlannedRun& run) {
    StepRates rates = peak_rates(run);
    const bool is_ampere = run.machines.gpu->chip.architecture < 90;
    rates.products *= is_ampere ? 0.87 : 0.8;
    rates.attention *= is_ampere ? 0.5 : 0.33;
    rates.memory *= 0.9;
    rates.launch = 4e-6;
    rates.multiprocessors = run.machines.gpu->chip.multiprocessors;
    rates.node = {.bytes = 0.8 * rates.node.bytes, .latency = 3.4e-6};
    rates.network = {.bytes = 0.73 * rates.network.bytes, .latency = 14e-6};
    rates.is_bound = false;
    return rates;
}

std::optional<PlannedTime> estimated_time(const PlannedRun& run, const RunNeeds& needs) {
    if (!run.machines.gpu || run.spec->dtype == DType::fp32) {
        if (!run.machines.gpu || run.machines.gpu->peak(DType::fp32, run.options.tf32) == 0)
            return std::nullopt;
    }
    const std::vector<StepTime> times = step_times(needs, WithoutLimits(*run.machines.sizes),
                                                   std::array{peak_rates(run), measured_rates(run)});
    const double expected = times.back().seconds / software_share;
    return PlannedTime{times.front().seconds, expected,
                       static_cast<double>(run.spec->global_batch_tokens) / expected};
}

// The time of a step that only a kernel's limit forbids.
std::optional<PlannedTime> time_without_limits(const PlannedRun& run) {
    try {
        const RunNeeds needs = needs_of(*run.spec, WithoutLimits(*run.machines.sizes), run.staging_bytes);
        check_micro_batches(*run.spec, needs.micro_batch);
        return estimated_time(run, needs);
    } catch (const BrokenRule&) {
        return std::nullopt;
    }
}

void plan_memory(PlannedRun& run) {
    const DeviceSizes& sizes = *run.machines.sizes;
    RunNeeds needs = needs_of(*run.spec, sizes, run.staging_bytes);
    check_micro_batches(*run.spec, needs.micro_batch);
    const std::int64_t micro_batches = run.spec->rank_sequences() / needs.micro_batch;
    run.fullest = short_plan(needs, needs.fullest_stage(), std::min(micro_batches, ShortStep(*run.spec).few),
                             sizes, run.staging_bytes);
    run.peak = activation_peak(*run.fullest);
    run.needs = std::move(needs);
    run.estimate = estimated_time(run, *run.needs);
    run.verdict = verdict_of(run);
    if (run.verdict != Verdict::does_not_fit) return;
    const auto bytes = static_cast<std::int64_t>(run.needs->largest_memory());
    const FindNeeds find = [&](const RunSpec& other, std::int64_t sequences) {
        return needs_of(other, sizes, run.staging_bytes, sequences);
    };
    run.why_not.push_back({std::string(memory_rule), bytes, static_cast<std::int64_t>(run.machines.usable),
                           remedy_of(*run.needs, find).as_options()});
}

std::vector<std::string>::iterator argument_of(std::vector<std::string>& arguments,
                                               const std::string& option) {
    const auto last = std::find_if(arguments.rbegin(), arguments.rend(), [&](const std::string& word) {
        return word == option || word.starts_with(option + "=");
    });
    return last == arguments.rend() ? arguments.end() : last.base() - 1;
}

// If --model names a model that is only described, takes the option out of the arguments.
const DescribedModel* take_described_model(std::vector<std::string>& arguments) {
    const auto word = argument_of(arguments, "--model");
    if (word == arguments.end()) return nullptr;
    const bool is_joined = word->size() > std::string_view("--model").size();
    const auto value = is_joined ? word : word + 1;
    if (value == arguments.end()) return nullptr;
    const DescribedModel* const model =
        described_model(is_joined ? value->substr(value->find('=') + 1) : *value);
    if (model) arguments.erase(word, value + 1);
    return model;
}

// A plan without an architecture: the mesh divides whatever it is.
void plan_nominal(PlannedRun& run, int ranks) {
    const Options& options = run.options;
    const auto divisions = static_cast<int>(options.pipeline_parallel * options.tensor_parallel);
    if (ranks % divisions != 0)
        refuse({"stages and tensor-parallel ranks divide the processes", ranks, divisions,
                fmt::format("--processes {}", (ranks / divisions + 1) * divisions)},
               "--pipeline-parallel x --tensor-parallel does not divide the processes");
    run.mesh = Mesh{.pipeline = static_cast<int>(options.pipeline_parallel),
                    .tensor = static_cast<int>(options.tensor_parallel),
                    .sharding = {.stage = static_cast<int>(options.zero_stage), .shards = ranks / divisions}};
    const std::optional<ConventionalMemory> memory = run.convention();
    run.verdict = !memory || memory->fits || run.described ? Verdict::fits : Verdict::does_not_fit;
    if (run.verdict == Verdict::does_not_fit)
        run.why_not.push_back({std::string(memory_rule), std::llround(1e9 * memory->per_gpu.total()),
                               std::llround(1e9 * (memory->per_gpu.total() + memory->left_gb)),
                               memory->least_gpus > ranks ? fmt::format("--processes {} --zero-stage 3",
                                                                        memory->least_gpus * divisions)
                                                          : "--zero-stage 3"});
}

// Options that are not those of one architecture, or of none.
void refuse_unused(const PlannedRun& run) {
    const PlanOptions& asked = run.asked;
    if (asked.parameters && (run.described || run.options.is_given("model")))
        user_error("--parameters plans a size without an architecture; leave out it or --model");
    if (asked.lost && !asked.tokens) user_error("--lost is a share of the time for --tokens; leave it out");
    if (asked.price && !asked.tokens) user_error("--price is that of a run over --tokens; leave it out");
    if (asked.speed && !asked.tokens) user_error("--speed is for the time of --tokens; leave it out");
    if (asked.convention == "ours" && asked.optimizer == "sgd")
        user_error("--convention-optimizer sgd: our runs use AdamW; choose another --memory-convention");
}

// The batch with which the model was published, for a plan of a whole run, as an argument; empty if there is none.
std::string published_batch(const PlannedRun& run) {
    if (!run.asked.tokens || run.options.is_given("global-batch-tokens") || run.asked.parameters ||
        run.described || run.options.folder)
        return "";
    const std::int64_t batch = named_model(run.options.model).batch_tokens;
    return batch == 0 ? "" : fmt::format("--global-batch-tokens={}", batch);
}

// A run on these machines.
void settle(PlannedRun& run, int ranks) {
    run.model = run.options.make_model();
    Configuration configuration =
        configured(run.options, run.machines.gpu ? DeviceKind::cuda : DeviceKind::cpu,
                   {.processes = ranks, .on_machine = run.machines.ranks_of_node});
    run.options = std::move(configuration.options);
    run.mesh = configuration.mesh;
    run.staging_bytes = run.machines.gpu ? 0 : HostCommunicator::staging_bytes(run.mesh->world());
    run.spec = run_spec(run.options, *run.mesh, *run.machines.sizes);
    if (run.options.plans_only()) return;  // prints lists, whatever they need
    run.spec->machine = {.bytes = run.machines.usable,
                         .name = run.machines.gpu ? run.machines.gpu->name : "this machine",
                         .more_processes_bring_more = run.machines.gpu.has_value()};
}

// The plan of complete options; why_not has the first rule that they break.
PlannedRun planned(const std::vector<std::string>& arguments, std::string& text) {
    PlannedRun run;
    try {
        if (!prepare(run, arguments, text)) return run;
        if (run.spec) plan_memory(run);
        if (run.spec && run.why_not.empty()) run.command = command_of(run);
    } catch (const BrokenRule& broken) {
        run.needs.reset();
        run.why_not.push_back(broken.rule);
        if (run.spec) run.estimate = time_without_limits(run);
    }
    // The number of processes has the name by which it was given.
    constexpr std::string_view processes = "--processes";
    for (Rule& rule : run.why_not) {
        const std::size_t place = rule.change.find(processes);
        if (run.asked.gpus && place != std::string::npos)
            rule.change.replace(place, processes.size(), "--gpus");
    }
    run.notes.insert(run.notes.begin(), run.options.notes.begin(), run.options.notes.end());
    return run;
}

std::vector<std::string> words_of(const std::string& text) {
    std::vector<std::string> words;
    std::size_t begin = 0;
    while (begin < text.size()) {
        const std::size_t end = std::min(text.find(' ', begin), text.size());
        words.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return words;
}

// The change that mends the run: after that of the first broken rule, another rule may be broken. Empty if that leads
// nowhere.
std::string whole_change(const std::vector<std::string>& arguments, const Rule& first) {
    constexpr int most_changes = 8;
    std::string change = first.change;
    std::vector<std::string> changed = arguments;
    std::vector<std::string> more = words_of(change);
    for (int i = 0; i < most_changes && !more.empty(); ++i) {
        changed.insert(changed.end(), more.begin(), more.end());
        std::string unused;
        try {
            const PlannedRun run = planned(changed, unused);
            if (run.why_not.empty()) return change;
            more = words_of(run.why_not.front().change);
            if (!more.empty()) change += " " + run.why_not.front().change;
        } catch (const UserError&) {
            return "";
        }
    }
    return "";
}

}  // namespace

bool prepare(PlannedRun& run, std::vector<std::string> arguments, std::string& text) {
    run.described = take_described_model(arguments);
    std::vector<const char*> words;
    for (const std::string& argument : arguments) words.push_back(argument.c_str());
    std::optional<Options> options =
        parse_options(static_cast<int>(words.size()), words.data(), text, plan_command_line(run.asked));
    if (!options) return false;
    run.options = *std::move(options);
    refuse_unused(run);
    if (const std::string batch = published_batch(run); !batch.empty()) {
        arguments.push_back(batch);
        run = {};
        run.notes.push_back(fmt::format("{} is that with which the model was published", batch));
        return prepare(run, arguments, text);
    }
    run.arguments = std::move(arguments);
    const PlanOptions& asked = run.asked;
    const std::int64_t mesh_ranks = run.options.pipeline_parallel * run.options.tensor_parallel;
    if (asked.gpus && asked.processes && asked.gpus != asked.processes)
        user_error("--gpus {} and --processes {} are one number; leave one of them out", *asked.gpus,
                   *asked.processes);
    const auto ranks = static_cast<int>(asked.gpus.value_or(asked.processes.value_or(mesh_ranks)));
    try {
        run.machines = machines_of(asked, run.options, ranks, run.notes);
        run.options = for_device(run.options, run.machines.gpu ? DeviceKind::cuda : DeviceKind::cpu);
        if (run.options.attention == "cudnn")
            run.notes.emplace_back(
                "--attention cudnn is planned as --attention flash: its workspace is known on a GPU only");
        if (run.described || asked.parameters) {
            plan_nominal(run, ranks);
        } else {
            settle(run, ranks);
        }
    } catch (const BrokenRule& broken) {
        throw BrokenRule(broken.rule, with_place(run.options, broken.what()));
    } catch (const UserError& fault) {
        throw UserError(with_place(run.options, fault.what()));
    }
    return true;
}

std::string_view name_of(Verdict verdict) {
    return name_among(verdict, "fits", "tight", "does not fit", "impossible");
}

double PlannedRun::parameters() const {
    if (asked.parameters) return *asked.parameters;
    if (described) return static_cast<double>(described->parameters);
    return model ? parameters_about(*model) : 0;
}

std::optional<double> PlannedRun::flops_per_token() const {
    if (described)
        return described->flops_per_token(options.is_given("seq-len") ? options.sequence_length()
                                                                      : described->sequence_length);
    return model ? std::optional(training_flops_per_token(*model)) : std::nullopt;
}

std::optional<ConventionalMemory> PlannedRun::convention() const {
    if (!mesh || asked.convention == "accelerate") return std::nullopt;
    constexpr double gb = 1e9;
    const bool is_ours = asked.convention == "ours";
    ConventionRequest request{
        .convention = convention_named(asked.convention, options.compute_dtype() == DType::bf16,
                                       static_cast<double>(size_of(options.kept_gradient_dtype()))),
        .parameters = parameters(),
        .activation_gb = parse_bytes(asked.activations).value_or(0) / gb,
        .half_weights = asked.activations == "half-weights",
        .uses_sgd = asked.optimizer == "sgd",
        .zero_stage = mesh->sharding.stage,
        .shards = mesh->sharding.shards,
        .divisions = std::int64_t{mesh->pipeline} * mesh->tensor};
    if (machines.gpu) request.card_gb = is_ours ? machines.gpu->gib * gib / gb : machines.gpu->nominal_gb;
    return conventional_memory(request);
}

// bytes: what AutoModel loads of this model. That is without a head that is not tied, and with RoPE's tables: fp32
// cosines and sines of each layer, position and element of a head.
double PlannedRun::accelerate_bytes() const {
    double bytes = 4 * parameters();
    if (described) bytes += static_cast<double>(described->buffer_bytes);
    if (!model) return bytes;
    const ModelChoices choices = options.choices_of_model();
    const auto has = [&](const char* name) { return choices.values.contains(name); };
    const auto size = [&](const char* name) { return static_cast<double>(choices.size(name)); };
    if (has("tied-head") && !choices.is_on("tied-head")) bytes -= 4 * size("vocab-size") * size("channels");
    if (has("rope-theta"))
        bytes += 2 * 4 * size("layers") * size("seq-len") * static_cast<double>(head_sizes(choices).size);
    return bytes;
}

std::optional<PlannedTime> PlannedRun::time() const {
    if (!asked.speed || !mesh) return estimate;
    const double speed = *asked.speed * mesh->world();
    return PlannedTime{.expected = spec ? static_cast<double>(spec->global_batch_tokens) / speed : 0,
                       .tokens_per_second = speed};
}

std::optional<Cost> PlannedRun::cost() const {
    const std::optional<PlannedTime> step = time();
    if (!asked.tokens || !step) return std::nullopt;
    Cost cost{.factor = 1 + asked.lost.value_or(0)};
    const double hours = *asked.tokens / step->tokens_per_second / 3600 * cost.factor;
    cost.gpu_hours = hours * mesh->world();
    cost.days = hours / 24;
    if (machines.gpu && machines.gpu->dollars_an_hour)
        cost.dollars = cost.gpu_hours * *machines.gpu->dollars_an_hour;
    return cost;
}

std::optional<BesideArenas> PlannedRun::beside() const {
    if (!machines.gpu || !mesh) return std::nullopt;
    constexpr std::size_t mib = 1 << 20;
    return BesideArenas{
        .context = 512 * mib, .libraries = 256 * mib, .nccl = mesh->world() > 1 ? 256 * mib : 0};
}

std::optional<PlannedRun> planned_run(const std::vector<std::string>& arguments, std::string& text) {
    PlannedRun run = planned(arguments, text);
    if (!text.empty()) return std::nullopt;
    for (Rule& rule : run.why_not) rule.change = whole_change(arguments, rule);
    return run;
}

}  // namespace llmc
