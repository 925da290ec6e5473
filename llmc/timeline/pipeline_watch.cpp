// Collects measured steps from all stages, and chooses a typical one.
#include "llmc/timeline/pipeline_watch.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace llmc {

namespace {

// Enough steps to find a typical one, and to know the typical times of passes.
constexpr std::size_t steps_kept = 8;
constexpr int clock_questions = 16;

Tensor tensor_of(double& number) { return {reinterpret_cast<std::byte*>(&number), DType::fp64, {1}}; }

// The first rank of each stage except the first stage.
std::vector<int> first_ranks_of_later_stages(const Mesh& mesh) {
    std::vector<int> ranks;
    for (int stage = 1; stage < mesh.pipeline; ++stage) ranks.push_back(mesh.rank_of(stage, 0, 0));
    return ranks;
}

}  // namespace

double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ClockOffset clock_offset(Communicator& world, std::span<const int> ranks, const Clock& now) {
    ClockOffset found;
    double least = std::numeric_limits<double>::infinity(), time = 0;
    for (const int rank : ranks) {
        for (int question = 0; question < clock_questions; ++question) {
            if (world.rank() == 0) {
                world.recv(tensor_of(time), rank);
                time = now();
                world.send(tensor_of(time), rank);
            } else if (world.rank() == rank) {
                const double asked = now();
                world.send(tensor_of(time), 0);
                world.recv(tensor_of(time), 0);
                const double answered = now();
                if (answered - asked >= least) continue;
                least = answered - asked;
                found = {.offset = time - (asked + answered) / 2, .error = least / 2};
            }
        }
    }
    if (std::abs(found.offset) <= found.error) found.offset = 0;
    return found;
}

void PipelineWatch::see(std::int64_t step, std::span<const ActionTime> times) {
    if (seen_.size() == steps_kept) {
        seen_.pop_front();
        has_first_ = false;
    }
    seen_.push_back({step, measured_passes(plan_.training, plan_.pipeline, times)});
}

// The passes of every step that was kept. Each pass is measured on one stage, so that the sum over ranks is
// that stage's value.
std::vector<std::vector<MeasuredPass>> PipelineWatch::passes_of_all() {
    const Mesh& mesh = plan_.spec.mesh;
    const ClockOffset clock = clock_offset(world_, first_ranks_of_later_stages(mesh), now_);
    constexpr std::size_t words = sizeof(MeasuredPass) / sizeof(double);
    static_assert(sizeof(MeasuredPass) == words * sizeof(double));
    const std::size_t size = plan_.pipeline.size();
    const auto stages = static_cast<std::size_t>(mesh.pipeline);
    // The passes of all steps, then the errors of the stages' clocks.
    std::vector<double> sums(seen_.size() * size * words + stages, 0.0);
    if (mesh.data_rank() == 0 && mesh.tensor_rank() == 0) {
        std::size_t at = 0;
        for (const Seen& seen : seen_) {
            for (const MeasuredPass& pass : seen.passes) {
                for (const double time : {pass.begin, pass.end, pass.awaited, pass.arrived})
                    sums[at++] = time > 0 ? time + clock.offset : 0;
                sums[at++] = pass.prepared;
            }
        }
        sums[at + static_cast<std::size_t>(mesh.stage())] = clock.error;
    }
    world_.all_reduce({reinterpret_cast<std::byte*>(sums.data()), DType::fp64, {std::ssize(sums)}});

    std::vector<std::vector<MeasuredPass>> steps(seen_.size(), std::vector<MeasuredPass>(size));
    std::size_t at = 0;
    for (std::vector<MeasuredPass>& passes : steps) {
        for (MeasuredPass& pass : passes) {
            pass = {sums[at], sums[at + 1], sums[at + 2], sums[at + 3], sums[at + 4]};
            at += words;
        }
    }
    clock_error_ = *std::max_element(sums.begin() + static_cast<std::ptrdiff_t>(at), sums.end());
    return steps;
}

std::optional<MeasuredPipeline> PipelineWatch::gather() {
    if (has_first_ && seen_.size() > 1) seen_.pop_front();
    if (seen_.empty()) return std::nullopt;
    const std::vector<std::vector<MeasuredPass>> steps = passes_of_all();
    std::vector<Timeline> timelines;
    std::vector<double> explained;
    for (const std::vector<MeasuredPass>& passes : steps) {
        timelines.push_back(measured_timeline(plan_.pipeline, passes));
        explained.push_back(share_explained(plan_.pipeline, passes));
    }
    std::ranges::sort(explained);
    std::vector<std::size_t> order(steps.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return timelines[i].total(); });
    const std::size_t typical = order[(order.size() - 1) / 2];
    return MeasuredPipeline{.step = seen_[typical].step,
                            .passes = steps[typical],
                            .timeline = std::move(timelines[typical]),
                            .steps = static_cast<int>(steps.size()),
                            .times = typical_times(plan_.pipeline, steps),
                            .explained = explained[(explained.size() - 1) / 2],
                            .clock_error = clock_error_};
}

}  // namespace llmc
