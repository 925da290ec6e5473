#include "llmc/planner/candidates.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/plan/micro_batches.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/run_spec.h"

namespace llmc {

namespace {

std::vector<int> divisors(int number) {
    std::vector<int> all;
    for (int i = 1; i <= number; ++i)
        if (number % i == 0) all.push_back(i);
    return all;
}

}  // namespace

StepRates rates_of(const PlannedRun& run) {
    return expected_rates(run.machines, run.options.compute_dtype(), run.options.tf32,
                          run.options.fp8 != "none");
}

std::optional<ModelTime> ModelTimes::of(const PlannedRun& run, const Candidate& mesh,
                                        bool sequence_parallel) {
    const auto [found, is_new] = known_.try_emplace({run.machines.ranks_of_node, mesh.tensor, mesh.recompute,
                                                     mesh.micro_batch, run.options.kept_gradient_dtype()});
    if (!is_new) return found->second;
    Options options = run.options;
    options.tensor_parallel = mesh.tensor;
    options.sequence_parallel = sequence_parallel;
    options.pipeline_parallel = 1;
    options.pipeline_schedule.clear();
    options.pipeline_layers.clear();
    options.virtual_stages.reset();
    options.zero_stage = 0;
    options.zero_shard_size.reset();
    options.offload_optimizer = options.offload_parameters = "none";
    options.recompute = mesh.recompute;
    if (mesh.recompute == "none") options.recompute_every.reset();
    options.micro_batch_size = mesh.micro_batch;
    options.global_batch_tokens = mesh.micro_batch * options.sequence_length();
    try {
        const Configuration configuration =
            configured(options, DeviceKind::cuda, {.processes = mesh.tensor, .on_machine = mesh.tensor});
        const RunSpec spec = run_spec(configuration.options, configuration.mesh, *run.machines.sizes);
        needs_of(spec, *run.machines.sizes, 0);  // throws if the model or a kernel does not allow the sizes
        found->second = model_time(spec, *run.machines.sizes, rates_of(run));
    } catch (const UserError&) {
    }
    return found->second;
}

Candidates::Candidates(const PlannedRun& run, ModelTimes& passes, Fixed fixed, bool uses_bounds)
    : run_(run),
      passes_(passes),
      fixed_(fixed),
      uses_bounds_(uses_bounds),
      options_(run.options),
      parameters_(parameters_about(run.options.make_model())),
      trained_(parameters_about(run.options.make_model(), true) / parameters_),
      weight_bytes_(parameter_bytes_about(run.options.make_model(), run.options.compute_dtype()) /
                    parameters_),
      rates_(rates_of(run)) {}

std::vector<Candidate> Candidates::all() {
    const std::int64_t sequences = *options_.global_batch_tokens / options_.sequence_length();
    for (const int tensor : choices("tensor-parallel", options_.tensor_parallel, {1, 2, 4, 8, 16, 32, 64})) {
        if (run_.processes % tensor != 0 || tensor > run_.machines.ranks_of_node) continue;
        const int rest = run_.processes / tensor;
        for (const int stages : choices("pipeline-parallel", options_.pipeline_parallel, divisors(rest))) {
            if (rest % stages != 0 || stages > options_.layers()) continue;
            const int data = rest / stages;
            if (sequences % data == 0)
                add_pipelines({.tensor = tensor, .stages = stages}, data, sequences / data);
        }
    }
    std::ranges::sort(found_, {}, [](const Candidate& mesh) {
        return std::tuple(mesh.least_seconds, std::string_view(mesh.options));
    });
    return std::move(found_);
}

// The given number, or all; stages of ZeRO that need less memory than that of the run.
std::vector<int> Candidates::choices(std::string_view option, std::int64_t given,
                                     const std::vector<int>& all) const {
    const auto own = static_cast<int>(given);
    const bool has_layers = option == "pipeline-parallel" && !options_.pipeline_layers.empty();
    if (has_layers || (fixed_ == Fixed::given && options_.is_given(option))) return {own};
    if (fixed_ == Fixed::given || option != "zero-stage") return all;
    std::vector<int> found;
    std::ranges::copy_if(all, std::back_inserter(found), [&](int number) { return number >= own; });
    return found;
}

std::vector<PipelineSchedule> Candidates::schedules() const {
    const bool is_given = options_.is_given("pipeline-schedule") || options_.is_given("virtual-stages");
    if (fixed_ == Fixed::given && is_given) return {options_.kind_of_pipeline_schedule()};
    return {PipelineSchedule::one_f_one_b, PipelineSchedule::interleaved, PipelineSchedule::zb_h1};
}

// Chunks of as many layers, where the stages have as many.
std::vector<int> Candidates::chunks_of(const Candidate& mesh) const {
    if (fixed_ == Fixed::given && options_.is_given("virtual-stages")) return {options_.chunks_of_stage()};
    if (mesh.schedule == PipelineSchedule::breadth_first)
        return {static_cast<int>(options_.layers() / mesh.stages)};
    if (mesh.schedule != PipelineSchedule::interleaved) return {1};
    std::vector<int> all;
    for (int chunks = 2; chunks <= 8; ++chunks)
        if (options_.layers() % mesh.stages != 0 || options_.layers() % (mesh.stages * chunks) == 0)
            all.push_back(chunks);
    return all;
}

void Candidates::add_pipelines(Candidate mesh, int data, std::int64_t sequences) {
    if (mesh.stages == 1) {
        mesh.schedule = options_.kind_of_pipeline_schedule();
        return add_micro_batches(mesh, data, sequences);
    }
    for (const PipelineSchedule schedule : schedules()) {
        mesh.schedule = schedule;
        for (const int chunks : chunks_of(mesh)) {
            mesh.chunks = chunks;
            if (std::int64_t{mesh.stages} * chunks <= options_.layers())
                add_micro_batches(mesh, data, sequences);
        }
    }
}

// The divisors of a rank's sequences that the device takes by default; the given one; or at most as many as the run
// has.
std::vector<std::int64_t> Candidates::micro_batches_of(std::int64_t sequences) const {
    const std::int64_t given = options_.micro_batch_size.value_or(0);
    if (fixed_ == Fixed::given && options_.is_given("micro-batch-size")) return {given};
    const std::int64_t most =
        fixed_ == Fixed::memory && given > 0
            ? given
            : run_.machines.sizes->default_micro_batch_tokens() / options_.sequence_length();
    std::vector<std::int64_t> sizes = {1};
    for (std::int64_t size = 2; size <= std::min(sequences, most); ++size)
        if (sequences % size == 0) sizes.push_back(size);
    return sizes;
}

std::vector<std::string_view> Candidates::recomputes() const {
    static constexpr std::array all = {"none", "selective", "block"};
    const auto* const own = std::ranges::find(all, std::string_view(options_.recompute));
    if (fixed_ == Fixed::memory) return {own, all.end()};
    if (options_.is_given("recompute")) return {*own};
    return {all.begin(), all.end()};
}

void Candidates::add_micro_batches(Candidate mesh, int data, std::int64_t sequences) {
    for (const std::int64_t size : micro_batches_of(sequences)) {
        mesh.micro_batch = size;
        if (sequences % size != 0 || sequences / size > most_micro_batches(options_.layers())) continue;
        if (mesh.schedule == PipelineSchedule::interleaved && sequences / size % mesh.stages != 0) continue;
        for (const std::string_view recompute : recomputes()) {
            mesh.recompute = recompute;
            add_sharding(mesh, data, sequences / size);
        }
    }
}

void Candidates::add_sharding(Candidate mesh, int data, std::int64_t micro_batches) {
    const int of_node = run_.machines.ranks_of_node / mesh.tensor;
    // One rank has nothing to share.
    const auto own = static_cast<int>(options_.zero_stage);
    for (const int stage : data > 1 ? choices("zero-stage", own, {0, 1, 2, 3}) : std::vector{own}) {
        mesh.zero_stage = stage;
        std::vector<int> shards = {0};
        const bool has_size = options_.is_given("zero-shard-size") || options_.shards_on_machine;
        if (fixed_ == Fixed::memory && has_size) shards.push_back(data);
        if (!has_size && stage > 0 && of_node > 1 && of_node < data && data % of_node == 0)
            shards.push_back(of_node);
        for (const int size : shards) {
            mesh.shards = size;
            add(mesh, data, micro_batches);
        }
    }
}

void Candidates::add(Candidate mesh, int data, std::int64_t micro_batches) {
    const auto pass = passes_.of(run_, mesh, is_sequence_parallel(mesh));
    if (!pass) return;
    ++considered_;
    const auto times = static_cast<double>(micro_batches);
    const Shares state = least_state(mesh, data);
    const double activations = least_activations(mesh, *pass, times);
    const auto exceeds = [](double bytes, std::size_t usable) {
        return usable > 0 && bytes > margin_of_bounds * static_cast<double>(usable);
    };
    if (uses_bounds_ && (exceeds(state.gpu + activations, run_.machines.usable) ||
                         exceeds(state.host, run_.machines.usable_host()) ||
                         exceeds(state.disk, run_.machines.usable_disk())))
        return;
    const double compute = least_compute(mesh, *pass, times);
    mesh.least_seconds = std::max({compute, least_exchange(mesh, data, times),
                                   least_offload(mesh, data, times, compute - pass->forward / mesh.stages)}) /
                         margin_of_bounds;
    mesh.least_bytes = state.gpu + activations;
    mesh.options = text_of(mesh);
    found_.push_back(mesh);
}

// A stage computes all micro-batches. Before the last stage does, the first of them passes the others, and then the
// last one passes them back; in ZB-H1 a part of that can wait.
double Candidates::least_compute(const Candidate& mesh, const ModelTime& pass, double micro_batches) const {
    const double back = mesh.schedule == PipelineSchedule::zb_h1 ? 0 : pass.backward;
    return (micro_batches * (pass.forward + pass.backward) +
            (mesh.stages - 1) * (pass.forward + back) / mesh.chunks) /
           mesh.stages;
}

// What the communication stream carries: from stage 2 on, gradients of each micro-batch; at stage 3, parameters
// twice, but those of the last layers that stay.
double Candidates::least_exchange(const Candidate& mesh, int data, double micro_batches) const {
    if (mesh.zero_stage < 2 || options_.is_given("reduce-every") ||
        options_.is_given("reshard-after-forward"))
        return 0;
    const double parameters = parameters_of_rank(mesh);
    const double gradients =
                     parameters * trained_ * static_cast<double>(size_of(options_.kept_gradient_dtype())),
                 gathered = parameters * weight_bytes_;
    const auto seconds = [&](double bytes) {
        return gather_seconds(bytes, static_cast<int>(shards_of(mesh, data)), mesh.tensor, rates_);
    };
    const double times = mesh.schedule == PipelineSchedule::breadth_first ? 1 : micro_batches;
    return times * (seconds(gradients) + (mesh.zero_stage == 3 ? 1.5 * seconds(gathered) : 0));
}

// The host updates after the last backward pass, a disk is written then, and the first micro-batch of the next step may
// begin: beside it are the other `passes`. The host's link brings the parameters of each pass, but those of the last
// layers, which stay.
double Candidates::least_offload(const Candidate& mesh, int data, double micro_batches, double passes) const {
    const double shards = shards_of(mesh, data), parameters = parameters_of_rank(mesh);
    const double host = rates_.times[TimePart::host];
    const auto at = [&](double bytes, double rate) { return rate > 0 ? bytes / rate : 0; };
    double seconds = 0;
    if (const std::string& tier = options_.offload_optimizer; tier != "none") {
        const double held = trained_ * parameters / (mesh.zero_stage > 0 ? shards : 1);
        const double moments = options_.store_dtypes().moment_bytes(),
                     master = options_.master_dtype == "none" ? 0 : 4,
                     update = 4 + 2 * moments + (master > 0 ? 10 : 4);
        const double on_disk = tier == "nvme" ? at(held * (moments + master), rates_.disk_write) : 0;
        seconds = passes + std::max(host * at(held * update, rates_.host_memory), on_disk);
    }
    if (options_.offload_parameters != "none" && mesh.schedule != PipelineSchedule::breadth_first) {
        const double bytes = parameters * weight_bytes_ / (mesh.zero_stage == 3 ? shards : 1);
        seconds = std::max(seconds, host * at(micro_batches * 1.5 * bytes, rates_.host_link));
    }
    return seconds;
}

double Candidates::shards_of(const Candidate& mesh, int data) const {
    if (mesh.shards > 0) return mesh.shards;
    return options_.zero_shard_size ? static_cast<double>(*options_.zero_shard_size) : data;
}

// The first stage keeps as many micro-batches of its layers as there are stages behind it. The head's logits do not
// count.
double Candidates::least_activations(const Candidate& mesh, const ModelTime& pass,
                                     double micro_batches) const {
    const double head = 2 * static_cast<double>(run_.machines.sizes->default_logits_bytes());
    const double layers = std::max(0.0, static_cast<double>(pass.activation_bytes) - head);
    return layers * std::min<double>(micro_batches, mesh.stages) / mesh.stages;
}

// The bytes of an average rank's share of the state. A host that updates has the gradients and parameters too, also
// where a disk has the rest. What is offloaded leaves a few layers' parameters and gradients.
Candidates::Shares Candidates::least_state(const Candidate& mesh, int data) const {
    const bool is_fp32 = options_.compute_dtype() == DType::fp32;
    const double moments = options_.store_dtypes().moment_bytes(),
                 master = is_fp32 || options_.master_dtype == "none" ? 0 : 4,
                 gradient = static_cast<double>(size_of(options_.kept_gradient_dtype()));
    const double parameters = parameters_of_rank(mesh), shards = shards_of(mesh, data);
    const auto divided = [&](int from) { return parameters / (mesh.zero_stage >= from ? shards : 1); };
    Shares shares;
    if (options_.offload_parameters == "none") shares.gpu += weight_bytes_ * divided(3);
    // Adapters have the compute dtype; without them, so have all weights.
    const double weight = is_fp32 ? 4 : 2, state = trained_ * (moments + master) * divided(1);
    if (options_.offload_optimizer == "none") {
        shares.gpu += state + trained_ * gradient * divided(2);
    } else if (options_.offload_optimizer == "cpu") {
        shares.host = state + trained_ * (gradient + weight) * divided(1);
    } else {
        shares.host = trained_ * gradient * divided(1);
        shares.disk = state;
    }
    return shares;
}

bool Candidates::is_sequence_parallel(const Candidate& mesh) const {
    if (fixed_ == Fixed::given && (options_.sequence_parallel || options_.is_given("sequence-parallel")))
        return options_.sequence_parallel;
    return mesh.tensor > 1 && options_.sequence_length() % mesh.tensor == 0;
}

// The options in which the candidate differs from the run.
std::string Candidates::text_of(const Candidate& mesh) const {
    std::string text;
    const auto say = [&](std::string_view option, const auto& value, const auto& own) {
        if (value != own) text += fmt::format(" --{} {}", option, value);
    };
    say("tensor-parallel", std::int64_t{mesh.tensor}, options_.tensor_parallel);
    if (const bool parallel = is_sequence_parallel(mesh); parallel != options_.sequence_parallel)
        text += parallel ? " --sequence-parallel" : " --sequence-parallel=false";
    say("pipeline-parallel", std::int64_t{mesh.stages}, options_.pipeline_parallel);
    if (mesh.stages > 1) {
        say("pipeline-schedule", name_of(mesh.schedule), name_of(options_.kind_of_pipeline_schedule()));
        say("virtual-stages", mesh.chunks, options_.chunks_of_stage());
    }
    say("zero-stage", std::int64_t{mesh.zero_stage}, options_.zero_stage);
    if (mesh.shards > 0) say("zero-shard-size", mesh.shards, 0);
    say("recompute", mesh.recompute, std::string_view(options_.recompute));
    say("micro-batch-size", mesh.micro_batch,
        options_.is_given("micro-batch-size") ? options_.micro_batch_size.value_or(0) : 0);
    return text.substr(std::min<std::size_t>(1, text.size()));
}

}  // namespace llmc
