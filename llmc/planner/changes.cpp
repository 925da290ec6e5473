#include "llmc/planner/changes.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/planner/best_meshes.h"

namespace llmc {

namespace {

bool breaks_no_rule(const std::vector<std::string>& arguments, const std::string& change) {
    std::string unused;
    try {
        return planned_run(with_options(arguments, change), unused)->why_not.empty();
    } catch (const UserError&) {
        return false;
    }
}

// The number of processes by the name by which it was given.
std::string with_own_name(const PlannedRun& run, std::string change) {
    constexpr std::string_view processes = "--processes ", gpus = "--gpus ";
    const auto [other, own] = run.asked.gpus ? std::pair(processes, gpus) : std::pair(gpus, processes);
    const std::size_t place = change.find(other);
    return place == std::string::npos ? change : change.replace(place, other.size(), own);
}

// The options of a text, of which later ones override earlier ones, each once.
std::string each_once(const std::string& options) {
    std::vector<std::string> found;  // "--option value"
    std::istringstream words(options);
    for (std::string word; words >> word;)
        word.starts_with("--") ? found.push_back(word) : static_cast<void>(found.back() += " " + word);
    const auto name = [](const std::string& option) { return option.substr(0, option.find_first_of(" =")); };
    std::string text;
    for (std::size_t i = 0; i < found.size(); ++i) {
        const auto is_again = [&](const std::string& later) { return name(later) == name(found[i]); };
        if (std::none_of(found.begin() + static_cast<std::ptrdiff_t>(i) + 1, found.end(), is_again))
            text += (text.empty() ? "" : " ") + found[i];
    }
    return text;
}

// The fastest change on as many GPUs, but for a few percent, or else on up to so many times as many.
std::string fastest_change(const PlannedRun& run, const std::vector<std::string>& arguments, int most_times) {
    constexpr Listed best{
        .most = 1, .at_least_faster = margin_of_bounds, .tried = 160, .tried_for_memory = 16};
    ModelTimes passes;
    Search search = best_with_less(run, passes, best, Fixed::memory);
    for (int times = 2; search.best.empty() && times <= most_times && !run.asked.nodes; times *= 2)
        search = best_with(run, {with_own_name(run, fmt::format("--gpus {}", times * run.processes))}, passes,
                           best, Fixed::memory);
    if (search.best.empty()) return "";
    // The batch of the search, which other ranks may not share evenly by default.
    for (const std::string& batch :
         {std::string(), fmt::format(" --global-batch-tokens {}", search.best.front().batch_tokens)})
        if (const std::string change = search.best.front().options + batch; breaks_no_rule(arguments, change))
            return change;
    return "";
}

// Options with which a run of a model that this program trains fits.
std::string change_that_fits(const PlannedRun& run, const std::vector<std::string>& arguments) {
    // The lists of deeper models take long to make for each run that a search compares.
    constexpr std::int64_t most_layers = 512;
    if (run.machines.gpu && run.estimate && run.spec->model.layers() <= most_layers) {
        if (std::string change = fastest_change(run, arguments, 64); !change.empty()) return change;
    } else if (run.why_not.front().rule == memory_rule) {
        const FindNeeds find(*run.machines.sizes, run.staging_bytes);
        return with_own_name(run, remedy_of(*run.needs, find).as_options());
    }
    return run.why_not.front().change;
}

// The change that mends the run: after that of a broken rule, another rule may be broken. Empty if that leads nowhere.
std::string whole_change(const PlannedRun& given, const std::vector<std::string>& arguments,
                         const Rule& broken) {
    constexpr int most_changes = 8;
    // A mesh that shares the given batch, rather than another batch
    if (broken.change.starts_with("--global-batch-tokens") && given.machines.gpu && !given.asked.nodes)
        if (std::string mesh = fastest_change(given, arguments, 1); !mesh.empty()) return mesh;
    const auto change_of = [&](const PlannedRun& run, const Rule& rule, const std::string& before) {
        return run.needs ? change_that_fits(run, with_options(arguments, before))
                         : with_own_name(run, rule.change);
    };
    std::string change = change_of(given, broken, "");
    std::string more = change;
    for (int i = 0; i < most_changes && !more.empty(); ++i) {
        std::string unused;
        try {
            const PlannedRun run = *planned_run(with_options(arguments, change), unused);
            if (run.why_not.empty()) return each_once(change);
            more = change_of(run, run.why_not.front(), change);
            if (!more.empty()) change += " " + more;
        } catch (const UserError&) {
            return "";
        }
    }
    return "";
}

}  // namespace

std::optional<PlannedRun> explained_run(const std::vector<std::string>& arguments, std::string& text) {
    std::optional<PlannedRun> run = planned_run(arguments, text);
    if (!run) return run;
    std::vector<std::string> changes;
    for (const Rule& rule : run->why_not)  // a change of memory mends all of them
        changes.push_back(run->needs && !changes.empty() ? changes.front()
                                                         : whole_change(*run, arguments, rule));
    const bool may_offload = run->machines.gpu && run->spec && run->machines.host_bytes == 0;
    for (std::size_t i = 0; i < changes.size(); ++i) {
        run->why_not[i].change = changes[i];
        if (may_offload && changes_numbers(changes[i])) run->notes.emplace_back(tries_the_host);
    }
    return run;
}

}  // namespace llmc
