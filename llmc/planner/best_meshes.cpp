#include "llmc/planner/best_meshes.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "llmc/core/error.h"

namespace llmc {

namespace {

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

// No run below this speed is listed.
double least_speed(const std::vector<Found>& best, const Listed& listed) {
    const double first = std::max(listed.needed, best.empty() ? 0 : best.front().tokens_per_second);
    const double others =
        std::max(listed.others, best.size() < listed.most ? 0 : best.back().tokens_per_second);
    return std::min(first, others);
}

}  // namespace

bool is_better(const Found& a, const Found& b) {
    return std::tuple(-a.rank, a.bytes, std::string_view(a.options)) <
           std::tuple(-b.rank, b.bytes, std::string_view(b.options));
}

void keep_best(std::vector<Found>& best, const Found& found, std::size_t most) {
    if (std::ranges::find(best, found.options, &Found::options) != best.end()) return;
    best.insert(std::ranges::upper_bound(best, found, is_better), found);
    if (best.size() > most) best.pop_back();
}

namespace {

// Simulates candidates, and keeps the best that fit.
class Trials {
  public:
    Trials(const PlannedRun& run, const Listed& listed, Search& search)
        : run_(run), listed_(listed), search_(search) {}

    // Some at a time, so that all processors have work, and the result does not depend on their number.
    static constexpr std::size_t at_once = 16;

    void of(std::span<const Candidate> candidates) {
        std::vector<std::optional<Estimate>> estimates(candidates.size());
        for_each_in_parallel(candidates.size(), [&](std::size_t i) {
            estimates[i] =
                estimate_of(with_options(run_.arguments, candidates[i].options), /*must_fit*/ true);
        });
        for (std::size_t i = 0; i < estimates.size(); ++i) {
            if (!estimates[i] || !estimates[i]->fits()) continue;
            ++search_.simulated;
            const double speed = estimates[i]->tokens_per_second;
            keep_best(search_.best,
                      {.options = candidates[i].options,
                       .gpus = run_.processes,
                       .batch_tokens = *run_.options.global_batch_tokens,
                       .bytes = estimates[i]->bytes,
                       .tokens_per_second = speed,
                       .dollars = dollars_of(run_, speed),
                       .rank = speed},
                      listed_.most);
        }
    }

  private:
    const PlannedRun& run_;
    const Listed& listed_;
    Search& search_;
};

// Of each number of tensor-parallel ranks and stages the one with the least memory, the least of all first.
std::vector<Candidate> with_least_memory(std::vector<Candidate> candidates, std::size_t most) {
    const auto mesh = [](const Candidate& of) { return std::pair(of.tensor, of.stages); };
    std::ranges::stable_sort(candidates, {}, &Candidate::least_bytes);
    std::set<std::pair<int, int>> seen;
    std::erase_if(candidates, [&](const Candidate& of) { return !seen.insert(mesh(of)).second; });
    candidates.resize(std::min(candidates.size(), most));
    return candidates;
}

}  // namespace

Search best_meshes(const PlannedRun& run, ModelTimes& passes, const Listed& listed, Fixed fixed,
                   bool uses_bounds) {
    Search search;
    Candidates candidates(run, passes, fixed, uses_bounds);
    const std::vector<Candidate> all = candidates.all();
    search.considered = candidates.considered();
    const auto batch = static_cast<double>(*run.options.global_batch_tokens);
    const double ratio = run.asked.measured_ratio().value_or(1);
    if (!all.empty()) search.most_speed = batch / (ratio * all.front().least_seconds);
    Trials trials(run, listed, search);
    if (listed.tried_for_memory > 0) {
        trials.of(with_least_memory(all, listed.tried_for_memory));
        if (search.best.empty()) return search;
    }
    const std::size_t tried = listed.tried > 0 ? std::min(all.size(), listed.tried) : all.size();
    for (std::size_t begin = 0; begin < tried; begin += Trials::at_once) {
        const double most = batch / (ratio * all[begin].least_seconds);
        if (uses_bounds && most < listed.at_least_faster * least_speed(search.best, listed)) break;
        trials.of(std::span(all).subspan(begin, std::min(tried - begin, Trials::at_once)));
    }
    return search;
}

namespace {

constexpr std::string_view disk_options = "--nvme-dir DIR";

// The options that keep state elsewhere than the run does, in these tiers; `of_disk`: only those that use a disk.
std::vector<std::string> offloads(const PlannedRun& run, const std::vector<std::string>& tiers, Fixed fixed,
                                  bool of_disk) {
    const Options& options = run.options;
    const auto choices = [&](std::string_view option, const std::string& now, bool may_move) {
        return (fixed == Fixed::given && options.is_given(option)) || !may_move ? std::vector{now} : tiers;
    };
    std::vector<std::string> found;
    for (const std::string& parameters :
         choices("offload-parameters", options.offload_parameters, options.reshard_after_forward))
        for (const std::string& state :
             choices("offload-optimizer", options.offload_optimizer, options.moments_dtype != "8bit")) {
            std::string text;
            if (state != options.offload_optimizer) text += " --offload-optimizer " + state;
            if (parameters != options.offload_parameters) text += " --offload-parameters " + parameters;
            const bool is_on_disk = text.find("nvme") != std::string::npos;
            if (is_on_disk && options.nvme_dir.empty()) text.append(" ").append(disk_options);
            if (!text.empty() && (is_on_disk || !of_disk)) found.push_back(text.substr(1));
        }
    return found;
}

// Smaller formats, the least change of numbers first.
std::vector<std::string> formats(const PlannedRun& run, Fixed fixed) {
    const Options& options = run.options;
    const auto may_change = [&](std::string_view option) {
        return fixed == Fixed::memory || !options.is_given(option);
    };
    const bool is_bf16 = options.compute_dtype() == DType::bf16;
    std::vector<std::string> gradients = {""}, moments = {""}, masters = {""}, found;
    if (is_bf16 && options.kept_gradient_dtype() == DType::fp32 && may_change("gradient-dtype"))
        gradients.emplace_back(" --gradient-dtype bf16");
    if (may_change("moments-dtype")) {
        if (options.kept_moments_dtype() == DType::fp32) moments.emplace_back(" --moments-dtype bf16");
        if (options.kept_moments_dtype() != DType::uint8 && options.offload_optimizer == "none")
            moments.emplace_back(" --moments-dtype 8bit");
    }
    if (is_bf16 && options.master_dtype != "none" && may_change("master-dtype"))
        masters.emplace_back(" --master-dtype none");
    for (const std::string& master : masters)
        for (const std::string& moment : moments)
            for (const std::string& gradient : gradients)
                if (const std::string all = fmt::format("{}{}{}", gradient, moment, master); !all.empty())
                    found.push_back(all.substr(1));
    return found;
}

}  // namespace

Search best_with(const PlannedRun& run, const std::vector<std::string>& alternatives, ModelTimes& passes,
                 const Listed& listed, Fixed fixed) {
    Search search;
    for (const std::string& options : alternatives) {
        PlannedRun changed;
        std::string unused;
        Search more;
        try {
            const std::vector<std::string> arguments = with_options(run.arguments, options);
            if (fixed == Fixed::given) {
                read(changed, arguments, unused);
            } else {
                // All meshes train the batch of this one.
                try {
                    prepare(changed, arguments, unused);
                } catch (const BrokenRule&) {  // another mesh may keep it
                    changed = {};
                    read(changed, arguments, unused);
                    if (!changed.options.is_given("global-batch-tokens")) continue;
                }
                changed.arguments = with_options(
                    changed.arguments,
                    fmt::format("--global-batch-tokens {}", *changed.options.global_batch_tokens));
            }
            Listed faster = listed;
            if (!search.best.empty()) faster.needed = search.best.front().tokens_per_second;
            if (search.best.size() == listed.most) faster.others = search.best.back().tokens_per_second;
            more = best_meshes(changed, passes, faster, fixed);
        } catch (const UserError&) {  // the options do not go together
            continue;
        }
        search.considered += more.considered;
        search.simulated += more.simulated;
        for (Found& found : more.best) {
            found.options = options + (options.empty() || found.options.empty() ? "" : " ") + found.options;
            keep_best(search.best, found, listed.most);
        }
    }
    return search;
}

Search best_with_less(const PlannedRun& run, ModelTimes& passes, const Listed& listed, Fixed fixed) {
    const bool has_disk = run.machines.nvme_bytes > 0 || !run.options.nvme_dir.empty();
    std::vector<std::string> tiers = {"none"};
    if (run.machines.host_bytes > 0) tiers.emplace_back("cpu");
    if (has_disk) tiers.emplace_back("nvme");
    const std::vector<std::string> beside = offloads(run, tiers, fixed, false);
    // A search has tried the first of these: the mesh alone.
    std::vector<std::vector<std::string>> levels(1);
    if (fixed == Fixed::memory) levels[0].emplace_back();
    levels[0].insert(levels[0].end(), beside.begin(), beside.end());
    for (const std::string& format : formats(run, fixed)) {
        std::vector<std::string> level = {format};
        for (const std::string& offload : beside) level.push_back(fmt::format("{} {}", format, offload));
        levels.push_back(std::move(level));
    }
    if (!has_disk) {
        tiers.emplace_back("nvme");
        levels.push_back(offloads(run, tiers, fixed, true));
    }
    Search all;
    for (const std::vector<std::string>& level : levels) {
        Search found = best_with(run, level, passes, listed, fixed);
        all.considered += found.considered;
        all.simulated += found.simulated;
        all.best = std::move(found.best);
        if (!all.best.empty()) break;
    }
    return all;
}

bool changes_numbers(const std::string& options) { return options.find("-dtype ") != std::string::npos; }

}  // namespace llmc
