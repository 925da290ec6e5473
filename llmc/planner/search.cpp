#include "llmc/planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/planner/best_meshes.h"
#include "llmc/planner/changes.h"

namespace llmc {

namespace {

constexpr int most_gpus = 1 << 17;

// The numbers of GPUs to try: all of one machine, then whole machines, four for each doubling.
int next_number(int number, int of_machine) {
    if (number < of_machine) return number + 1;
    const auto machines = static_cast<unsigned>(number / of_machine);
    return (number / of_machine + static_cast<int>(std::max(1U, std::bit_floor(machines) / 4))) * of_machine;
}

// The search of one GPU model in any number.
class Numbers {
  public:
    // by_price: ranks by tokens/s per dollar, otherwise by tokens/s of a GPU.
    Numbers(std::vector<std::string> arguments, std::string gpu, bool by_price)
        : arguments_(std::move(arguments)), gpu_(std::move(gpu)), by_price_(by_price) {}

    Search run() {
        int number = 1;
        while (number <= most_gpus && at(number).best.empty()) number = next_number(number, of_machine_);
        if (number > most_gpus) return std::move(search_);
        search_.fewest = at(number).best.front();
        // More GPUs need less recomputation or sharding, until their exchanges take longer.
        for (double last = 0;
             number <= most_gpus && !at(number).best.empty() && at(number).best.front().rank > last;
             number *= 2)
            last = at(number).best.front().rank;
        search_.cheapest = search_.best.front();
        if (given_.days) search_.in_time = in_time();
        return std::move(search_);
    }

  private:
    // The search of a number of GPUs: its best run, unless that has less than `needed` tokens/s, and those that are
    // among the best of all numbers.
    const Search& at(int number, double needed = 0) {
        const auto [known, is_new] = known_.try_emplace(number);
        if (!is_new) return known->second;
        PlannedRun run;
        std::string unused;
        const std::string open =
            fmt::format("{}--gpus {}", gpu_.empty() ? "" : fmt::format("--gpu {} ", gpu_), number);
        read(run, with_options(arguments_, open), unused);
        given_ = run.asked;
        of_machine_ = run.machines.gpu->node > 2 ? run.machines.gpu->node : 8;
        Listed listed{.needed = needed};
        if (search_.best.size() == listed.most)
            listed.others = number * search_.best.back().tokens_per_second / search_.best.back().gpus;
        known->second = best_meshes(run, passes_, listed);
        search_.considered += known->second.considered;
        search_.simulated += known->second.simulated;
        for (Found& mesh : known->second.best) {
            mesh.options = open + " " + mesh.options;
            mesh.rank = by_price_ ? 1 / *mesh.dollars : mesh.tokens_per_second / number;
            keep_best(search_.best, mesh);
        }
        return known->second;
    }

    std::optional<Found> in_time() {
        const double needed = *given_.tokens * (1 + given_.lost.value_or(0)) / (*given_.days * 86400);
        double fastest = 0;
        int since = 0;  // numbers that cannot have more speed
        constexpr int most_in_vain = 8;
        for (int number = search_.fewest->gpus; since < most_in_vain && number <= most_gpus;
             number = next_number(number, of_machine_)) {
            const Search& search = at(number, needed);
            if (!search.best.empty() && search.best.front().tokens_per_second >= needed)
                return search.best.front();
            since = search.most_speed > fastest ? 0 : since + 1;
            fastest = std::max(fastest, search.most_speed);
        }
        return std::nullopt;
    }

    std::vector<std::string> arguments_;
    std::string gpu_;
    bool by_price_;
    PlanOptions given_;
    int of_machine_ = 8;
    ModelTimes passes_;
    Search search_;
    std::map<int, Search> known_;
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
    bool has_less = false;  // memory than the options that were given ask for
    for (const std::string& gpu : gpus) {
        const std::string name = gpus.size() > 1 ? gpu : "";
        if (is_open) {
            add(search, Numbers(arguments, name, without_price.empty()).run());
            continue;
        }
        PlannedRun run;
        const std::string option = name.empty() ? "" : "--gpu " + name;
        read(run, with_options(arguments, option), unused);
        ModelTimes passes;
        Search found = best_meshes(run, passes);
        if (found.best.empty() && gpus.size() == 1) {
            found = best_with_less(run, passes, {.tried_for_memory = 16}, Fixed::given);
            has_less = !found.best.empty();
        }
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
    // Its verdict is that of a plan of the same options.
    if (!given.asked.reserve_gib) chosen += fmt::format(" --reserve {}", reserve_of_plan);
    PlannedRun run = *explained_run(with_options(arguments, chosen), unused);
    if (!without_price.empty() && (is_open || gpus.size() > 1))
        run.notes.push_back(
            fmt::format("{} has no price here, so runs are ranked by tokens/s{}; --price gives one",
                        without_price, is_open ? " of a GPU" : ""));
    if (search.best.empty())
        run.notes.push_back(
            fmt::format("--search found no {} that leaves {} of a GPU free (--reserve)",
                        is_open ? "number of GPUs with a run" : "run",
                        human_bytes(static_cast<std::int64_t>(given.asked.reserve() * (1 << 30)))));
    if (has_less && changes_numbers(search.best.front().options) && run.machines.host_bytes == 0)
        run.notes.emplace_back(tries_the_host);
    if (has_less)
        run.notes.push_back(
            fmt::format("--search: nothing fits with all state on the GPUs in the formats that were given; "
                        "the runs above {}",
                        changes_numbers(search.best.front().options)
                            ? "keep less of it, in formats that change the numbers of the training"
                            : "keep some of it beside the GPUs, and train the same numbers"));
    if (given.asked.days && !search.in_time && !search.best.empty())
        run.notes.push_back(fmt::format("--days {}: no number of GPUs ends the run in time with this batch",
                                        *given.asked.days));
    run.search = std::move(search);
    return run;
}

}  // namespace llmc
