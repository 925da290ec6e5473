#include "llmc/planner/planned_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <sstream>
#include <string_view>
#include <utility>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/host_communicator.h"
#include "llmc/comm/launcher.h"
#include "llmc/core/text.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/plan/micro_batches.h"
#include "llmc/plan/step_time.h"
#include "llmc/plan/whole_pipeline.h"
#include "llmc/train/command_line.h"
#include "llmc/train/report.h"
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
    DType fp8_dtype() const override { return sizes_.fp8_dtype(); }
    std::int64_t default_micro_batch_tokens() const override { return sizes_.default_micro_batch_tokens(); }
    std::int64_t default_logits_bytes() const override { return sizes_.default_logits_bytes(); }

  private:
    const DeviceSizes& sizes_;
};

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
    const Options& options = run.options;
    if (options.has_adapters() && options.init.empty())  // a plan needs no weights, and adapters have a base
        text.append(" --init ")
            .append(options.model_folder.empty() ? "FOLDER" : shell_word(options.model_folder));
    return text;
}

// Whether the host and the disks hold what is offloaded, as far as they are known.
bool fit_beside(const RunNeeds& needs, const PlannedMachines& machines) {
    const auto fits = [](std::size_t bytes, std::size_t usable) { return usable == 0 || bytes <= usable; };
    return fits(needs.largest_host_memory(), machines.usable_host()) &&
           fits(needs.largest_disk(), machines.usable_disk());
}

Verdict verdict_of(const PlannedRun& run) {
    const std::size_t bytes = run.needs->largest_memory();
    const auto on_node = static_cast<std::size_t>(run.machines.gpu ? 1 : run.machines.ranks_of_node);
    constexpr auto last = static_cast<std::size_t>(gib);
    if (!fit_beside(*run.needs, run.machines)) return Verdict::does_not_fit;
    if (run.machines.usable == 0) return Verdict::fits;
    if (bytes > run.machines.usable) return Verdict::does_not_fit;
    return bytes * on_node + last > run.machines.usable * on_node ? Verdict::tight : Verdict::fits;
}

// The speed of CPUs is not known, and that of a described GPU in bf16 alone.
bool has_time(const PlannedRun& run) {
    return run.machines.gpu && run.machines.gpu->peak(run.spec->dtype, run.options.tf32) > 0 &&
           (run.spec->fp8 == Fp8Scaling::none || run.machines.gpu->fp8 > 0);
}

// As published steps took, or as one's own did.
StepTime expected_step(const PlannedRun& run, const ShortPlans& plans) {
    const RunSpec& spec = *run.spec;
    StepTime time = step_time(
        plans, expected_rates(run.machines, spec.dtype, run.options.tf32, spec.fp8 != Fp8Scaling::none));
    double ratio = run.asked.measured_ratio().value_or(1);
    if (ratio < 1)  // no step is faster than the peak allows
        ratio =
            std::max(ratio, step_time(plans, peak_rates(run.machines, spec.dtype, run.options.tf32)).seconds /
                                time.seconds);
    time.seconds *= ratio;
    for (double& part : time.parts.of) part *= ratio;
    return time;
}

std::optional<PlannedTime> estimated_time(const PlannedRun& run, const ShortPlans& plans) {
    if (!has_time(run)) return std::nullopt;
    const RunSpec& spec = *run.spec;
    const StepTime expected = expected_step(run, plans);
    return PlannedTime{
        .bound = step_time(plans, peak_rates(run.machines, spec.dtype, run.options.tf32)).seconds,
        .expected = expected.seconds,
        .tokens_per_second = static_cast<double>(spec.global_batch_tokens) / expected.seconds,
        .parts = expected.parts,
        .range = run.asked.measured.empty()
                     ? published_range(*run.machines.gpu, spec.dtype, spec.fp8 != Fp8Scaling::none, *run.mesh)
                     : std::nullopt};
}

// The time of a step that only a kernel's limit forbids.
std::optional<PlannedTime> time_without_limits(const PlannedRun& run) {
    try {
        const WithoutLimits sizes(*run.machines.sizes);
        const RunNeeds needs = needs_of(*run.spec, sizes, run.staging_bytes);
        check_micro_batches(*run.spec, needs.micro_batch);
        return estimated_time(run, short_plans(*run.spec, sizes, run.staging_bytes, needs.micro_batch));
    } catch (const BrokenRule&) {
        return std::nullopt;
    }
}

// The options that move what is offloaded from the host's memory to a disk.
std::string change_from_host(const Offload& offload) {
    return offload.state == Tier::host        ? "--offload-optimizer nvme --nvme-dir DIR"
           : offload.parameters == Tier::host ? "--offload-parameters nvme --nvme-dir DIR"
                                              : "";
}

void plan_memory(PlannedRun& run) {
    const DeviceSizes& sizes = *run.machines.sizes;
    RunNeeds needs = needs_of(*run.spec, sizes, run.staging_bytes);
    check_micro_batches(*run.spec, needs.micro_batch);
    if (needs.lacking_copy > 0) run.notes.push_back(lack_of_copy(needs.lacking_copy));
    run.spec->copies_checkpoints = needs.spec.copies_checkpoints;
    ShortPlans plans = short_plans(*run.spec, sizes, run.staging_bytes, needs.micro_batch);
    run.estimate = estimated_time(run, plans);
    run.fullest = std::move(plans.first[static_cast<std::size_t>(needs.fullest_stage())]);
    run.peak = activation_peak(*run.fullest);
    run.needs = std::move(needs);
    run.verdict = verdict_of(run);
    if (run.verdict != Verdict::does_not_fit) return;
    const auto exceeds = [&](std::string_view rule, std::size_t bytes, std::size_t usable,
                             std::string change) {
        if (usable > 0 && bytes > usable)
            run.why_not.push_back({std::string(rule), static_cast<std::int64_t>(bytes),
                                   static_cast<std::int64_t>(usable), std::move(change)});
    };
    exceeds(memory_rule, run.needs->largest_memory(), run.machines.usable, "");
    exceeds(host_rule, run.needs->largest_host_memory(), run.machines.usable_host(),
            change_from_host(run.mesh->sharding.offload));
    exceeds(disk_rule, run.needs->largest_disk(), run.machines.usable_disk(), "");
}

std::vector<std::string>::iterator argument_of(std::vector<std::string>& arguments,
                                               const std::string& option) {
    const auto last = std::find_if(arguments.rbegin(), arguments.rend(), [&](const std::string& word) {
        return word == option || word.starts_with(option + "=");
    });
    return last == arguments.rend() ? arguments.end() : last.base() - 1;
}

// If --model names a model that is only described, takes the option out of the arguments.
std::optional<DescribedModel> take_described_model(std::vector<std::string>& arguments) {
    const auto word = argument_of(arguments, "--model");
    if (word == arguments.end()) return std::nullopt;
    const bool is_joined = word->size() > std::string_view("--model").size();
    const auto value = is_joined ? word : word + 1;
    if (value == arguments.end()) return std::nullopt;
    std::optional<DescribedModel> model =
        described_model(is_joined ? value->substr(value->find('=') + 1) : *value);
    if (model) arguments.erase(word, value + 1);
    return model;
}

// A plan without an architecture: the mesh divides whatever it is.
void plan_nominal(PlannedRun& run) {
    const Options& options = run.options;
    const int ranks = run.processes;
    const auto divisions = static_cast<int>(options.pipeline_parallel * options.tensor_parallel);
    if (ranks % divisions != 0)
        refuse({"stages and tensor-parallel ranks divide the processes", ranks, divisions,
                fmt::format("--processes {}", (ranks / divisions + 1) * divisions)},
               "--pipeline-parallel x --tensor-parallel does not divide the processes");
    run.mesh = Mesh{.pipeline = static_cast<int>(options.pipeline_parallel),
                    .tensor = static_cast<int>(options.tensor_parallel),
                    .sharding = {.stage = static_cast<int>(options.zero_stage),
                                 .shards = ranks / divisions,
                                 .offload = options.offload()}};
    const std::optional<ConventionalMemory> memory = run.convention();
    run.verdict = !memory || memory->fits ? Verdict::fits : Verdict::does_not_fit;
    if (!run.machines.gpu) std::ranges::move(offload_without_effect(options), std::back_inserter(run.notes));
    if (run.verdict != Verdict::does_not_fit) return;
    const auto exceeds = [&](std::string_view rule, double gb, double left, int sharing, std::string change) {
        const auto bytes_of_rank = [&](double all) { return std::llround(1e9 * all / sharing); };
        if (left < 0)
            run.why_not.push_back(
                {std::string(rule), bytes_of_rank(gb), bytes_of_rank(gb + left), std::move(change)});
    };
    const int on_machine = run.machines.ranks_of_node;
    exceeds(memory_rule, memory->per_gpu.total(), memory->left_gb, 1,
            memory->least_gpus > ranks
                ? fmt::format("--processes {} --zero-stage 3", memory->least_gpus * divisions)
                : "--zero-stage 3");
    exceeds(host_rule, memory->host.gb, memory->host.left_gb.value_or(0), on_machine,
            change_from_host(run.mesh->sharding.offload));
    exceeds(disk_rule, memory->disk.gb, memory->disk.left_gb.value_or(0), on_machine, "");
}

// Options that are not those of one architecture, or of none.
void refuse_unused(const PlannedRun& run) {
    const PlanOptions& asked = run.asked;
    if (asked.parameters && (run.described || run.options.is_given("model")))
        user_error("--parameters plans a size without an architecture; leave out it or --model");
    const bool is_nominal = asked.parameters || run.described;
    for (const char* option : {"offload-optimizer", "offload-parameters"})
        if (is_nominal && (asked.convention == "ours" || asked.convention == "accelerate") &&
            run.options.is_given(option))
            user_error(
                "--{} without a model that this program trains is planned by another "
                "--memory-convention; give one, such as mixed-12",
                option);
    if (run.options.has_adapters() && (is_nominal || run.options.given.contains("memory-convention")))
        user_error("--lora-rank: {}; leave it out",
                   is_nominal ? "adapters are planned for models that this program trains"
                              : "conventions count the training of all weights");
    if (asked.parameters && asked.activations == "by-layer")
        user_error(
            "--convention-activations by-layer needs the layers and channels of a model; give --model in "
            "place of "
            "--parameters, or a size such as 10GB");
    if (asked.levers && (run.described || asked.parameters))
        user_error("--levers lists options of a model that this program trains; leave it out");
    if (asked.days && !asked.search) user_error("--days needs --search, which finds the GPUs for it");
    if (asked.lost && !asked.tokens) user_error("--lost is a share of the time for --tokens; leave it out");
    if (asked.price && !asked.tokens && !asked.search)
        user_error("--price is that of a run over --tokens, or of a --search; leave it out");
    if (!asked.measured.empty() && (run.options.device == "cpu" || is_nominal))
        user_error("--measured corrects times, and those of {} are not planned; leave it out",
                   is_nominal ? "a size without an architecture" : "CPUs");
    if (!asked.measured.empty() && asked.speed)
        user_error("--measured corrects times, which --speed replaces; leave one of them out");
    if (asked.speed && !asked.tokens) user_error("--speed is for the time of --tokens; leave it out");
    if (asked.convention == "ours" && asked.optimizer == "sgd")
        user_error(
            "--convention-optimizer is for other conventions; give --optimizer sgd, or another "
            "--memory-convention");
}

// The context and about the batch with which the model was published, for a plan of a whole run, as arguments. Of the
// batches that differ by at most a sixteenth, all ranks share one that has many micro-batches: its share of each
// process, or of an odd number of them if there are more processes than sequences, is divisible by the largest power of
// two.
std::vector<std::string> published_sizes(const PlannedRun& run) {
    std::vector<std::string> arguments;
    if (!(run.asked.tokens || run.asked.search) || run.asked.parameters || run.described ||
        run.options.folder)
        return arguments;
    const NamedModel& model = named_model(run.options.model);
    std::int64_t length = run.options.sequence_length();
    if (model.context != 0 && model.context != length && !run.options.is_given("seq-len")) {
        length = model.context;
        arguments.push_back(fmt::format("--seq-len={}", length));
    }
    if (model.batch_tokens == 0 || run.options.is_given("global-batch-tokens")) return arguments;
    const std::int64_t processes = run.processes,
                       odd = processes / std::gcd(processes, std::int64_t{1} << 20),
                       of_model = run.options.tensor_parallel * run.options.pipeline_parallel;
    // A search takes meshes with fewer data-parallel ranks than that.
    const std::int64_t fewest = run.asked.search || processes % of_model != 0 ? odd : processes / of_model;
    const std::int64_t micro_batch =
        length * std::max<std::int64_t>(1, run.options.micro_batch_size.value_or(1));
    const std::int64_t unit =
        micro_batch * (micro_batch * processes <= model.batch_tokens ? processes : fewest);
    const std::int64_t nearest = std::max<std::int64_t>(1, (model.batch_tokens + unit / 2) / unit);
    std::int64_t units = nearest;
    const auto distance = [&](std::int64_t of) { return std::abs(of * unit - model.batch_tokens); };
    const auto is_better = [&](std::int64_t of) {
        const auto twos = [](std::int64_t number) {
            return std::countr_zero(static_cast<std::uint64_t>(number));
        };
        return twos(of) > twos(units) || (twos(of) == twos(units) && distance(of) < distance(units));
    };
    for (std::int64_t of = std::max<std::int64_t>(1, nearest * 15 / 16); of <= nearest * 17 / 16; ++of)
        if (distance(of) * 16 <= model.batch_tokens && is_better(of)) units = of;
    arguments.push_back(fmt::format("--global-batch-tokens={}", units * unit));
    return arguments;
}

// A run on these machines.
void settle(PlannedRun& run) {
    run.model = run.options.make_model();
    Configuration configuration =
        configured(run.options, run.machines.gpu ? DeviceKind::cuda : DeviceKind::cpu,
                   {.processes = run.processes, .on_machine = run.machines.ranks_of_node});
    run.options = std::move(configuration.options);
    run.mesh = configuration.mesh;
    if (!run.machines.gpu)
        std::ranges::move(offload_without_effect(run.options), std::back_inserter(run.notes));
    run.staging_bytes = run.machines.gpu ? 0 : HostCommunicator::staging_bytes(run.mesh->world());
    run.spec = run_spec(run.options, *run.mesh, *run.machines.sizes);
    if (run.options.plans_only()) return;  // prints lists, whatever they need
    run.spec->machine = {.bytes = run.machines.usable,
                         .host_bytes = run.machines.usable_host(),
                         .name = run.machines.gpu ? run.machines.gpu->name : "this machine",
                         .more_processes_bring_more = run.machines.gpu.has_value(),
                         .is_of_cpu = !run.machines.gpu};
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
    run.notes.insert(run.notes.begin(), run.options.notes.begin(), run.options.notes.end());
    return run;
}

// Errors that belong to a setting of the configuration file name its line.
template <class Function>
void with_places(const PlannedRun& run, const Function& function) {
    try {
        function();
    } catch (const BrokenRule& broken) {
        throw BrokenRule(broken.rule, with_place(run.options, broken.what()));
    } catch (const UserError& fault) {
        throw UserError(with_place(run.options, fault.what()));
    }
}

}  // namespace

std::vector<std::string> with_options(std::vector<std::string> arguments, const std::string& options) {
    std::istringstream words(options);
    for (std::string word; words >> word;) arguments.push_back(word);
    return arguments;
}

bool read(PlannedRun& run, std::vector<std::string> arguments, std::string& text) {
    run.described = take_described_model(arguments);
    std::vector<const char*> words;
    for (const std::string& argument : arguments) words.push_back(argument.c_str());
    std::optional<Options> options =
        parse_options(static_cast<int>(words.size()), words.data(), text, plan_command_line(run.asked));
    if (!options) return false;
    run.options = *std::move(options);
    refuse_unused(run);
    const PlanOptions& asked = run.asked;
    if (asked.gpus && asked.processes && asked.gpus != asked.processes)
        user_error("--gpus {} and --processes {} are one number; leave one of them out", *asked.gpus,
                   *asked.processes);
    const std::int64_t of_mesh = run.options.pipeline_parallel * run.options.tensor_parallel;
    run.processes = static_cast<int>(asked.gpus.value_or(asked.processes.value_or(of_mesh)));
    if (const std::vector<std::string> published = published_sizes(run); !published.empty()) {
        arguments.insert(arguments.end(), published.begin(), published.end());
        const std::int64_t of_model = named_model(run.options.model).batch_tokens;
        run = {};
        const bool is_read = read(run, arguments, text);
        const bool is_larger = run.options.global_batch_tokens.value_or(0) > of_model * 17 / 16;
        run.notes.insert(
            run.notes.begin(),
            fmt::format("{}: {} as the model was published", fmt::join(published, " "),
                        is_larger ? "a sequence for each data-parallel rank; otherwise" : "about"));
        return is_read;
    }
    const std::int64_t context =
        run.described || asked.parameters || run.options.folder ? 0 : named_model(run.options.model).context;
    if (context != 0 && !run.options.is_given("seq-len") && context != run.options.sequence_length())
        run.notes.push_back(
            fmt::format("the model was published with contexts of {0} tokens: --seq-len {0}", context));
    run.arguments = std::move(arguments);
    // What starts no run needs no directory on a disk.
    if ((run.described || asked.parameters) && run.options.nvme_dir.empty()) run.options.nvme_dir = "DIR";
    with_places(run, [&] {
        run.machines = machines_of(asked, run.options, run.processes, run.notes);
        run.options = for_device(run.options, run.machines.gpu ? DeviceKind::cuda : DeviceKind::cpu);
    });
    if (run.options.attention == "cudnn")
        run.notes.emplace_back(
            "--attention cudnn is planned as --attention flash: its workspace is known on a GPU only");
    return true;
}

bool prepare(PlannedRun& run, const std::vector<std::string>& arguments, std::string& text) {
    if (!read(run, arguments, text)) return false;
    with_places(run, [&] { run.described || run.asked.parameters ? plan_nominal(run) : settle(run); });
    return true;
}

std::optional<Estimate> estimate_of(const std::vector<std::string>& arguments, bool must_fit) {
    try {
        PlannedRun run;
        std::string unused;
        if (!prepare(run, arguments, unused)) return std::nullopt;
        const RunSpec& spec = *run.spec;
        const DeviceSizes& sizes = *run.machines.sizes;
        check_sizes_of(spec);
        const std::int64_t micro_batch = micro_batch_of(spec);
        check_micro_batches(spec, micro_batch);
        if (must_fit && FindNeeds(sizes, run.staging_bytes).least(spec, micro_batch) > run.machines.usable)
            return std::nullopt;
        ShortPlans plans = short_plans(spec, sizes, run.staging_bytes, micro_batch);
        RunNeeds needs = needs_of(plans);
        const bool has_room =
            needs.largest_memory() <= run.machines.usable && fit_beside(needs, run.machines);
        if (spec.copies_checkpoints && !has_room) {
            run.spec->copies_checkpoints = false;
            plans = short_plans(spec, sizes, run.staging_bytes, micro_batch);
            needs = needs_of(plans);
        }
        Estimate estimate{.bytes = needs.largest_memory(),
                          .usable = run.machines.usable,
                          .fits_beside = fit_beside(needs, run.machines)};
        if ((must_fit && !estimate.fits()) || !has_time(run)) return estimate;
        estimate.seconds = expected_step(run, plans).seconds;
        estimate.tokens_per_second = static_cast<double>(spec.global_batch_tokens) / estimate.seconds;
        return estimate;
    } catch (const UserError&) {  // a rule is broken
        return std::nullopt;
    }
}

std::string_view name_of(Verdict verdict) {
    return name_among(verdict, "fits", "tight", "does not fit", "impossible");
}

double PlannedRun::parameters() const {
    if (asked.parameters) return *asked.parameters;
    if (described) return static_cast<double>(described->parameters);
    return model ? parameters_about(*model) : 0;
}

std::int64_t PlannedRun::sequence_length() const {
    return described && !options.is_given("seq-len") ? described->sequence_length : options.sequence_length();
}

std::optional<double> PlannedRun::flops_per_token() const {
    if (described) return described->flops_per_token(sequence_length());
    return model ? std::optional(training_flops_per_token(*model)) : std::nullopt;
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
    return run;
}

}  // namespace llmc
