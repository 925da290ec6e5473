#include "llmc/planner/best_meshes.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <optional>
#include <string_view>
#include <thread>
#include <tuple>

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
    best.insert(std::ranges::upper_bound(best, found, is_better), found);
    if (best.size() > most) best.pop_back();
}

Search best_meshes(const PlannedRun& run, ModelTimes& passes, const Listed& listed, Fixed fixed,
                   bool uses_bounds) {
    Search search;
    Candidates candidates(run, passes, fixed, uses_bounds);
    const std::vector<Candidate> all = candidates.all();
    search.considered = candidates.considered();
    const auto batch = static_cast<double>(*run.options.global_batch_tokens);
    const double ratio = run.asked.measured_ratio().value_or(1);
    if (!all.empty()) search.most_speed = batch / (ratio * all.front().least_seconds);
    // Some at a time, so that all processors have work, and the result does not depend on their number.
    constexpr std::size_t at_once = 16;
    for (std::size_t begin = 0; begin < all.size(); begin += at_once) {
        const double most = batch / (ratio * all[begin].least_seconds);
        if (uses_bounds && most < listed.at_least_faster * least_speed(search.best, listed)) break;
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
            keep_best(search.best,
                      {.options = all[begin + i].options,
                       .gpus = run.processes,
                       .batch_tokens = *run.options.global_batch_tokens,
                       .bytes = estimates[i]->bytes,
                       .tokens_per_second = speed,
                       .dollars = dollars_of(run, speed),
                       .rank = speed},
                      listed.most);
        }
    }
    return search;
}

namespace {

constexpr std::string_view disk_options = "--nvme-dir DIR";

// The options that keep state beside the GPUs, in a tier of the host.
std::vector<std::string> offloads(const PlannedRun& run, std::string_view tier, Fixed fixed) {
    const Options& options = run.options;
    const auto may_move = [&](std::string_view option, const std::string& now) {
        return fixed == Fixed::given ? !options.is_given(option)
                                     : now == "none" || (now == "cpu" && tier == "nvme");
    };
    const bool may_state = may_move("offload-optimizer", options.offload_optimizer) &&
                           options.moments_dtype != "8bit",
               may_parameters = may_move("offload-parameters", options.offload_parameters);
    const std::string disk =
                          tier == "nvme" && options.nvme_dir.empty() ? fmt::format(" {}", disk_options) : "",
                      state = fmt::format("--offload-optimizer {}", tier),
                      parameters = fmt::format("--offload-parameters {}", tier);
    std::vector<std::string> found;
    if (may_state) found.push_back(state + disk);
    if (may_parameters) found.push_back(parameters + disk);
    if (may_state && may_parameters) found.push_back(fmt::format("{} {}{}", state, parameters, disk));
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
                prepare(changed, arguments, unused);
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
    std::vector<std::string> beside;
    if (run.machines.host_bytes > 0) beside = offloads(run, "cpu", fixed);
    const bool has_disk = run.machines.nvme_bytes > 0 || !run.options.nvme_dir.empty();
    const std::vector<std::string> on_disk = offloads(run, "nvme", fixed);
    if (has_disk) beside.insert(beside.end(), on_disk.begin(), on_disk.end());
    // A search has tried the first of these: the mesh alone.
    std::vector<std::vector<std::string>> levels(1);
    if (fixed == Fixed::memory) levels[0].emplace_back();
    levels[0].insert(levels[0].end(), beside.begin(), beside.end());
    for (const std::string& format : formats(run, fixed)) {
        std::vector<std::string> level = {format};
        for (const std::string& offload : beside) level.push_back(fmt::format("{} {}", format, offload));
        levels.push_back(std::move(level));
    }
    if (!has_disk) levels.push_back(on_disk);
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
