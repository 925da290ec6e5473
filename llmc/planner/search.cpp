#include "llmc/planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <future>
#include <map>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/plan/step_time.h"
#include "llmc/train/run_spec.h"

namespace llmc {

namespace {

constexpr std::size_t most_best = 10;
constexpr int most_gpus = 1 << 17;
// Bounds take the stages of a pipeline for equal, which they are not quite.
constexpr double margin = 1.03;

// What a search varies. The options that are not given say it.
struct Candidate {
    int tensor = 1, stages = 1, chunks = 1;  // chunks of a stage
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int zero_stage = 0, shards = 0;  // 0: all data-parallel ranks
    std::string_view recompute = "none";
    std::int64_t micro_batch = 1;
    std::string options{};
    double least_seconds = 0;  // no step is faster
};

StepRates rates_of(const PlannedRun& run) {
    return expected_rates(run.machines, run.options.compute_dtype(), run.options.tf32,
                          run.options.fp8 != "none");
}

// The candidates of one model on one number of GPUs.
class Candidates {
  public:
    Candidates(const PlannedRun& run, bool uses_bounds)
        : run_(run), uses_bounds_(uses_bounds), options_(run.options), rates_(rates_of(run)) {}

    std::vector<Candidate> all() {
        const std::int64_t sequences = *options_.global_batch_tokens / options_.sequence_length();
        for (const int tensor : choices("tensor-parallel", options_.tensor_parallel, powers_of_two())) {
            if (run_.processes % tensor != 0 || tensor > run_.machines.ranks_of_node) continue;
            const int rest = run_.processes / tensor;
            for (const int stages :
                 choices("pipeline-parallel", options_.pipeline_parallel, divisors(rest))) {
                if (rest % stages != 0 || stages > options_.layers()) continue;
                const int data = rest / stages;
                if (sequences % data == 0)
                    add_pipelines({.tensor = tensor, .stages = stages}, data, sequences / data);
            }
        }
        return std::move(found_);
    }
    std::int64_t considered() const { return considered_; }

  private:
    static std::vector<int> powers_of_two() { return {1, 2, 4, 8, 16, 32, 64}; }
    static std::vector<int> divisors(int number) {
        std::vector<int> all;
        for (int i = 1; i <= number; ++i)
            if (number % i == 0) all.push_back(i);
        return all;
    }
    // Chunks of as many layers, where the stages have as many.
    std::vector<int> chunks_of(int stages) const {
        std::vector<int> all;
        for (int chunks = 2; chunks <= 8; ++chunks)
            if (options_.layers() % stages != 0 || options_.layers() % (stages * chunks) == 0)
                all.push_back(chunks);
        return all;
    }
    // The value that was given, or all.
    template <class T, class U>
    std::vector<T> choices(std::string_view option, const U& given, const std::vector<T>& all) const {
        std::vector<T> found = all;
        if (options_.is_given(option)) found.assign(1, static_cast<T>(given));
        return found;
    }

    void add_pipelines(Candidate mesh, int data, std::int64_t sequences) {
        const bool has_schedule =
            options_.is_given("pipeline-schedule") || options_.is_given("virtual-stages");
        if (mesh.stages == 1) {
            if (has_schedule) mesh.schedule = options_.kind_of_pipeline_schedule();
            return add_micro_batches(mesh, data, sequences);
        }
        const std::vector<PipelineSchedule> schedules =
            has_schedule ? std::vector{options_.kind_of_pipeline_schedule()}
                         : std::vector{PipelineSchedule::one_f_one_b, PipelineSchedule::interleaved,
                                       PipelineSchedule::zb_h1};
        for (const PipelineSchedule schedule : schedules) {
            mesh.schedule = schedule;
            std::vector<int> chunks = {1};
            if (schedule == PipelineSchedule::interleaved) chunks = chunks_of(mesh.stages);
            if (schedule == PipelineSchedule::breadth_first)
                chunks = {static_cast<int>(options_.layers() / mesh.stages)};
            if (options_.is_given("virtual-stages")) chunks = {options_.chunks_of_stage()};
            for (const int of_stage : chunks) {
                mesh.chunks = of_stage;
                if (std::int64_t{mesh.stages} * of_stage <= options_.layers())
                    add_micro_batches(mesh, data, sequences);
            }
        }
    }

    void add_micro_batches(Candidate mesh, int data, std::int64_t sequences) {
        const std::int64_t most =
            run_.machines.sizes->default_micro_batch_tokens() / options_.sequence_length();
        std::vector<std::int64_t> sizes = {1};
        for (std::int64_t size = 2; size <= std::min(sequences, most); ++size)
            if (sequences % size == 0) sizes.push_back(size);
        for (const std::int64_t size :
             choices("micro-batch-size", options_.micro_batch_size.value_or(1), sizes)) {
            mesh.micro_batch = size;
            if (sequences % size != 0) continue;
            if (mesh.schedule == PipelineSchedule::interleaved && sequences / size % mesh.stages != 0)
                continue;
            for (const std::string_view recompute :
                 choices("recompute", std::string_view(options_.recompute),
                         std::vector<std::string_view>{"none", "selective", "block"})) {
                mesh.recompute = recompute;
                add_sharding(mesh, data, sequences / size);
            }
        }
    }

    void add_sharding(Candidate mesh, int data, std::int64_t micro_batches) {
        const std::vector<int> stages = data > 1 ? std::vector{0, 1, 2, 3} : std::vector{0};
        const int of_node = run_.machines.ranks_of_node / mesh.tensor;
        for (const int stage : choices("zero-stage", options_.zero_stage, stages)) {
            mesh.zero_stage = stage;
            std::vector<int> shards = {0};
            const bool is_open = !options_.is_given("zero-shard-size") && !options_.shards_on_machine;
            if (is_open && stage > 0 && of_node > 1 && of_node < data && data % of_node == 0)
                shards.push_back(of_node);
            for (const int size : shards) {
                mesh.shards = size;
                add(mesh, data, micro_batches);
            }
        }
    }

    void add(Candidate mesh, int data, std::int64_t micro_batches) {
        const auto pass = pass_of(mesh);
        if (!pass) return;
        ++considered_;
        const double bytes =
            least_bytes(mesh, data) + least_activations(mesh, *pass, static_cast<double>(micro_batches));
        if (uses_bounds_ && bytes > margin * static_cast<double>(run_.machines.usable)) return;
        mesh.least_seconds = std::max(least_compute(mesh, *pass, static_cast<double>(micro_batches)),
                                      least_exchange(mesh, data, static_cast<double>(micro_batches)));
        mesh.options = text_of(mesh);
        found_.push_back(mesh);
    }

    // A stage computes all micro-batches. Before the last stage does, the first of them passes the others, and then the
    // last one passes them back; in ZB-H1 a part of that can wait.
    double least_compute(const Candidate& mesh, const ModelTime& pass, double micro_batches) const {
        const double back = mesh.schedule == PipelineSchedule::zb_h1 ? 0 : pass.backward;
        return (micro_batches * (pass.forward + pass.backward) +
                (mesh.stages - 1) * (pass.forward + back) / mesh.chunks) /
               mesh.stages;
    }

    // What the communication stream carries: from stage 2 on, gradients of each micro-batch; at stage 3, parameters
    // twice, but those of the last layers that stay.
    double least_exchange(const Candidate& mesh, int data, double micro_batches) const {
        if (mesh.zero_stage < 2 || options_.is_given("reduce-every") ||
            options_.is_given("reshard-after-forward"))
            return 0;
        const double parameters = parameters_of_rank(mesh);
        const double gradients = parameters * static_cast<double>(size_of(options_.kept_gradient_dtype())),
                     gathered = parameters * static_cast<double>(size_of(options_.compute_dtype()));
        const auto seconds = [&](double bytes) {
            return gather_seconds(bytes, static_cast<int>(shards_of(mesh, data)), mesh.tensor, rates_);
        };
        const double times = mesh.schedule == PipelineSchedule::breadth_first ? 1 : micro_batches;
        return times * (seconds(gradients) + (mesh.zero_stage == 3 ? 1.5 * seconds(gathered) : 0));
    }

    double parameters_of_rank(const Candidate& mesh) const {
        return run_.parameters() / mesh.tensor / mesh.stages;
    }
    double shards_of(const Candidate& mesh, int data) const {
        if (options_.is_given("zero-shard-size")) return static_cast<double>(*options_.zero_shard_size);
        return mesh.shards > 0 ? mesh.shards : data;
    }

    // The first stage keeps as many micro-batches of its layers as there are stages behind it. The head's logits do not
    // count.
    double least_activations(const Candidate& mesh, const ModelTime& pass, double micro_batches) const {
        const double head = 2 * static_cast<double>(run_.machines.sizes->default_logits_bytes());
        const double layers = std::max(0.0, static_cast<double>(pass.activation_bytes) - head);
        return layers * std::min<double>(micro_batches, mesh.stages) / mesh.stages;
    }

    // The bytes of an average rank's share of the state.
    double least_bytes(const Candidate& mesh, int data) const {
        const double parameters = parameters_of_rank(mesh);
        const bool is_fp32 = options_.compute_dtype() == DType::fp32;
        const double moments = 2 * static_cast<double>(size_of(options_.kept_moments_dtype())),
                     master = is_fp32 || options_.master_dtype == "none" ? 0 : 4;
        const double shards = shards_of(mesh, data);
        const auto divided = [&](int from) { return mesh.zero_stage >= from ? shards : 1; };
        // What is offloaded leaves a few layers' parameters and gradients.
        const bool has_state = options_.offload_optimizer == "none",
                   has_parameters = options_.offload_parameters == "none";
        return parameters *
               ((has_parameters ? (is_fp32 ? 4 : 2) / divided(3) : 0) +
                (has_state ? static_cast<double>(size_of(options_.kept_gradient_dtype())) / divided(2) +
                                 (moments + master) / divided(1)
                           : 0));
    }

    // The time of a micro-batch over all stages; none if the model cannot be divided so.
    std::optional<ModelTime> pass_of(const Candidate& mesh) {
        const auto [found, is_new] = passes_.try_emplace({mesh.tensor, mesh.recompute, mesh.micro_batch});
        if (!is_new) return found->second;
        Options options = options_;
        options.tensor_parallel = mesh.tensor;
        options.sequence_parallel = is_sequence_parallel(mesh);
        options.pipeline_parallel = 1;
        options.pipeline_schedule.clear();
        options.pipeline_layers.clear();
        options.virtual_stages.reset();
        options.zero_stage = 0;
        options.zero_shard_size.reset();
        options.recompute = mesh.recompute;
        if (mesh.recompute == "none") options.recompute_every.reset();
        options.micro_batch_size = mesh.micro_batch;
        options.global_batch_tokens = mesh.micro_batch * options.sequence_length();
        try {
            const Configuration configuration =
                configured(options, DeviceKind::cuda, {.processes = mesh.tensor, .on_machine = mesh.tensor});
            const RunSpec spec = run_spec(configuration.options, configuration.mesh, *run_.machines.sizes);
            needs_of(spec, *run_.machines.sizes,
                     0);  // throws if the model or a kernel does not allow the sizes
            found->second = model_time(spec, *run_.machines.sizes, rates_);
        } catch (const UserError&) {
        }
        return found->second;
    }

    bool is_sequence_parallel(const Candidate& mesh) const {
        if (options_.is_given("sequence-parallel")) return options_.sequence_parallel;
        return mesh.tensor > 1 && options_.sequence_length() % mesh.tensor == 0;
    }

    std::string text_of(const Candidate& mesh) const {
        std::string text;
        const auto say = [&](std::string_view option, bool differs, const auto& value) {
            if (differs && !options_.is_given(option)) text += fmt::format(" --{} {}", option, value);
        };
        say("tensor-parallel", mesh.tensor > 1, mesh.tensor);
        if (is_sequence_parallel(mesh) && !options_.is_given("sequence-parallel"))
            text += " --sequence-parallel";
        say("pipeline-parallel", mesh.stages > 1, mesh.stages);
        say("pipeline-schedule", mesh.stages > 1 && mesh.schedule != PipelineSchedule::one_f_one_b,
            name_of(mesh.schedule));
        say("virtual-stages", mesh.chunks > 1, mesh.chunks);
        say("zero-stage", mesh.zero_stage > 0, mesh.zero_stage);
        say("zero-shard-size", mesh.shards > 0, mesh.shards);
        say("recompute", mesh.recompute != "none", mesh.recompute);
        say("micro-batch-size", true, mesh.micro_batch);
        return text.substr(std::min<std::size_t>(1, text.size()));
    }

    const PlannedRun& run_;
    bool uses_bounds_;
    const Options& options_;
    const StepRates rates_;
    std::vector<Candidate> found_;
    std::map<std::tuple<int, std::string_view, std::int64_t>, std::optional<ModelTime>> passes_;

    std::int64_t considered_ = 0;
};

// The faster first; then those that leave more memory.
bool is_better(const Found& a, const Found& b) {
    return std::tuple(-a.rank, a.bytes, std::string_view(a.options)) <
           std::tuple(-b.rank, b.bytes, std::string_view(b.options));
}

void keep_best(std::vector<Found>& best, const Found& found) {
    best.insert(std::ranges::upper_bound(best, found, is_better), found);
    if (best.size() > most_best) best.pop_back();
}

// Calls function(i) for all i < count, on all processors.
template <class Function>
void for_each_in_parallel(std::size_t count, const Function& function) {
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
        for (std::size_t i = next++; i < count; i = next++) function(i);
    };
    std::vector<std::future<void>> others;
    for (unsigned other = 1; other < std::thread::hardware_concurrency(); ++other)
        others.push_back(std::async(std::launch::async, work));
    work();
    for (std::future<void>& other : others) other.get();
}

// Dollars for 1e9 tokens.
std::optional<double> dollars_of(const PlannedRun& run, double tokens_per_second) {
    if (!run.machines.gpu->dollars_an_hour) return std::nullopt;
    return 1e9 / tokens_per_second / 3600 * run.processes * *run.machines.gpu->dollars_an_hour;
}

// The numbers of GPUs to try: all of one machine, then whole machines, four for each doubling.
int next_number(int number, int of_machine) {
    if (number < of_machine) return number + 1;
    const auto machines = static_cast<unsigned>(number / of_machine);
    return (number / of_machine + static_cast<int>(std::max(1U, std::bit_floor(machines) / 4))) * of_machine;
}

}  // namespace

Search best_meshes(const PlannedRun& run, bool uses_bounds) {
    Search search;
    Candidates candidates(run, uses_bounds);
    std::vector<Candidate> all = candidates.all();
    search.considered = candidates.considered();
    std::ranges::sort(all, {}, [](const Candidate& mesh) {
        return std::tuple(mesh.least_seconds, std::string_view(mesh.options));
    });
    const auto batch = static_cast<double>(*run.options.global_batch_tokens);
    // Some at a time, so that all processors have work, and the result does not depend on their number.
    constexpr std::size_t at_once = 16;
    for (std::size_t begin = 0; begin < all.size(); begin += at_once) {
        const double least = run.asked.measured_ratio().value_or(1) * all[begin].least_seconds / margin;
        if (uses_bounds && search.best.size() == most_best &&
            batch / least < search.best.back().tokens_per_second)
            break;
        const std::size_t end = std::min(all.size(), begin + at_once);
        std::vector<std::optional<Estimate>> estimates(end - begin);
        for_each_in_parallel(end - begin, [&](std::size_t i) {
            estimates[i] =
                estimate_of(with_options(run.arguments, all[begin + i].options), /*must_fit*/ true);
        });
        for (std::size_t i = 0; i < estimates.size(); ++i) {
            if (!estimates[i] || !estimates[i]->fits()) continue;
            ++search.simulated;
            const double speed = estimates[i]->tokens_per_second;
            keep_best(search.best, {.options = all[begin + i].options,
                                    .gpus = run.processes,
                                    .bytes = estimates[i]->bytes,
                                    .tokens_per_second = speed,
                                    .dollars = dollars_of(run, speed),
                                    .rank = speed});
        }
    }
    return search;
}

namespace {

// The search of one GPU model in any number.
class Numbers {
  public:
    // by_price: ranks by tokens/s per dollar, otherwise by tokens/s of a GPU.
    Numbers(std::vector<std::string> arguments, std::string gpu, bool by_price)
        : arguments_(std::move(arguments)), gpu_(std::move(gpu)), by_price_(by_price) {}

    Search run() {
        int number = 1;
        while (number <= most_gpus && at(number).empty()) number = next_number(number, of_machine_);
        if (number > most_gpus) return std::move(search_);
        search_.fewest = at(number).front();
        // More GPUs need less recomputation or sharding, until their exchanges take longer.
        for (double last = 0; number <= most_gpus && !at(number).empty() && at(number).front().rank > last;
             number *= 2)
            last = at(number).front().rank;
        search_.cheapest = search_.best.front();
        if (given_.days) search_.in_time = in_time();
        return std::move(search_);
    }

  private:
    // The best of a number of GPUs.
    const std::vector<Found>& at(int number) {
        const auto [known, is_new] = known_.try_emplace(number);
        if (!is_new) return known->second;
        PlannedRun run;
        std::string unused;
        const std::string open =
            fmt::format("{}--gpus {}", gpu_.empty() ? "" : fmt::format("--gpu {} ", gpu_), number);
        read(run, with_options(arguments_, open), unused);
        given_ = run.asked;
        of_machine_ = run.machines.gpu->node > 2 ? run.machines.gpu->node : 8;
        const StepRates rates = rates_of(run);
        const double flops =
            run.options.fp8 == "none" ? rates.products : std::max(rates.products, rates.fp8_products);
        most_speed_ = flops / rates.times[TimePart::products] / run.asked.measured_ratio().value_or(1) /
                      *run.flops_per_token();
        Search found = best_meshes(run);
        search_.considered += found.considered;
        search_.simulated += found.simulated;
        for (Found& mesh : found.best) {
            mesh.options = open + " " + mesh.options;
            mesh.rank = by_price_ ? 1 / *mesh.dollars : mesh.tokens_per_second / number;
            keep_best(search_.best, mesh);
        }
        return known->second = std::move(found.best);
    }

    std::optional<Found> in_time() {
        const double needed = *given_.tokens * (1 + given_.lost.value_or(0)) / (*given_.days * 86400);
        double fastest = 0;
        int since = 0;  // numbers tried without more speed
        constexpr int most_in_vain = 8;
        for (int number = search_.fewest->gpus; since < most_in_vain && number <= most_gpus;
             number = next_number(number, of_machine_)) {
            if (number * most_speed_ < needed) continue;
            const std::vector<Found>& best = at(number);
            if (!best.empty() && best.front().tokens_per_second >= needed) return best.front();
            const double speed = best.empty() ? 0 : best.front().tokens_per_second;
            since = speed > fastest ? 0 : since + 1;
            fastest = std::max(fastest, speed);
        }
        return std::nullopt;
    }

    std::vector<std::string> arguments_;
    std::string gpu_;
    bool by_price_;
    PlanOptions given_;
    int of_machine_ = 8;
    double most_speed_ = 0;  // tokens/s of a GPU
    Search search_;
    std::map<int, std::vector<Found>> known_;
};

void refuse_unsearchable(const PlannedRun& run) {
    const PlanOptions& asked = run.asked;
    if (run.described || asked.parameters)
        user_error("--search simulates runs of a model that this program trains; leave it out for {}",
                   asked.parameters ? "--parameters" : run.described->name);
    if (!run.machines.gpu)
        user_error("--search compares times, and those of CPUs are not known; leave out --device cpu");
    if (run.machines.gpu->peak(run.options.compute_dtype(), run.options.tf32) == 0)
        user_error("--search compares times, and those of {} on this GPU are not known; give --dtype bf16",
                   run.options.dtype);
    if (run.options.fp8 != "none" && run.machines.gpu->fp8 == 0)
        user_error("--search compares times, and those of fp8 on this GPU are not known; give --fp8 none");
    if (asked.speed) user_error("--search compares times, which --speed replaces; leave one of them out");
    if (asked.days && !asked.tokens) user_error("--days is the time for --tokens; give them too");
    if (asked.days && (asked.gpus || asked.processes))
        user_error("--days finds a number of GPUs; leave out --{}", asked.gpus ? "gpus" : "processes");
    if (asked.nodes && !asked.gpus && !asked.processes)
        user_error("--nodes divides the GPUs that --gpus gives; leave it out, or give both");
    if (!run.options.is_given("global-batch-tokens"))
        user_error("--search compares runs of one batch; give --global-batch-tokens");
}

void add(Search& all, Search more) {
    all.considered += more.considered;
    all.simulated += more.simulated;
    for (const Found& found : more.best) keep_best(all.best, found);
    const auto fewer = [](const std::optional<Found>& a, const std::optional<Found>& b) {
        return a && (!b || a->gpus < b->gpus || (a->gpus == b->gpus && is_better(*a, *b)));
    };
    if (fewer(more.fewest, all.fewest)) all.fewest = more.fewest;
    if (fewer(more.in_time, all.in_time)) all.in_time = more.in_time;
    if (more.cheapest && (!all.cheapest || is_better(*more.cheapest, *all.cheapest)))
        all.cheapest = more.cheapest;
}

}  // namespace

PlannedRun searched_run(const std::vector<std::string>& arguments) {
    PlannedRun given;
    std::string unused;
    read(given, arguments, unused);
    refuse_unsearchable(given);
    const bool is_open = !given.asked.gpus && !given.asked.processes;
    const std::vector<std::string> gpus = gpu_names(given.asked);
    std::string without_price;
    for (const std::string& gpu : gpus)
        if (gpus.size() == 1 ? !given.machines.gpu->dollars_an_hour : !known_gpu(gpu).dollars_an_hour)
            without_price = gpu;
    Search search;
    for (const std::string& gpu : gpus) {
        const std::string name = gpus.size() > 1 ? gpu : "";
        if (is_open) {
            add(search, Numbers(arguments, name, without_price.empty()).run());
            continue;
        }
        PlannedRun run;
        const std::string option = name.empty() ? "" : "--gpu " + name;
        read(run, with_options(arguments, option), unused);
        Search found = best_meshes(run);
        for (Found& mesh : found.best) {
            if (!option.empty()) mesh.options = option + " " + mesh.options;
            if (gpus.size() > 1 && without_price.empty()) mesh.rank = 1 / *mesh.dollars;
        }
        add(search, std::move(found));
    }
    // Where nothing fits, the plan of what needs least says why.
    std::string chosen;
    for (const auto& [option, value] :
         {std::pair("zero-stage", "3"), {"recompute", "block"}, {"micro-batch-size", "1"}})
        if (!given.options.is_given(option)) chosen += fmt::format(" --{} {}", option, value);
    if (!search.best.empty()) chosen = search.best.front().options;
    if (is_open && search.fewest) chosen = search.fewest->options;
    if (search.in_time) chosen = search.in_time->options;
    PlannedRun run = *planned_run(with_options(arguments, chosen), unused);
    if (!without_price.empty() && (is_open || gpus.size() > 1))
        run.notes.push_back(
            fmt::format("{} has no price here, so runs are ranked by tokens/s{}; --price gives one",
                        without_price, is_open ? " of a GPU" : ""));
    if (search.best.empty())
        run.notes.emplace_back(
            is_open ? "--search found no number of GPUs that fits"
                    : "--search found no run that fits; without a number of GPUs, it finds how many do");
    if (given.asked.days && !search.in_time && !search.best.empty())
        run.notes.push_back(fmt::format("--days {}: no number of GPUs ends the run in time with this batch",
                                        *given.asked.days));
    run.search = std::move(search);
    return run;
}

}  // namespace llmc
