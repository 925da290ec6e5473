// Groups a step's actions into passes, and computes typical times of passes.
#include "llmc/timeline/measured_passes.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {

namespace {

// The pass to which an action of the compute stream belongs. Actions without one prepare the next part of the
// model, or finish the work of the last one.
std::optional<Pass> pass_of(const Step& step, const PipelineSpec& spec, const Action& action) {
    const auto pass = [&](PassKind kind) {
        return Pass{kind, step.chunk_of(action).number, action.micro_batch};
    };
    switch (action.kind) {
        case ActionKind::forward:
            return pass(PassKind::forward);
        case ActionKind::backward:
        case ActionKind::backward_input:
            return pass(spec.splits_backward() ? PassKind::backward_input : PassKind::backward);
        case ActionKind::backward_weight:
            return pass(PassKind::backward_weight);
        default:
            return std::nullopt;
    }
}

bool prepares(ActionKind kind) {
    return kind == ActionKind::load || kind == ActionKind::recompute || kind == ActionKind::zero;
}

bool finishes_gradients(ActionKind kind) {
    return kind == ActionKind::round || kind == ActionKind::accumulate;
}

// The pass that waits for what an action receives.
Pass receiving_pass(const Step& step, const PipelineSpec& spec, const Action& action) {
    PassKind kind = PassKind::forward;
    if (action.kind == ActionKind::receive_gradient)
        kind = spec.splits_backward() ? PassKind::backward_input : PassKind::backward;
    return {kind, step.chunk_of(action).number, action.micro_batch};
}

bool is_receipt(const Action& action) {
    return action.kind == ActionKind::receive_activation || action.kind == ActionKind::receive_gradient;
}

// Whether an action of a pass must wait for the input that the pass receives.
bool awaits_input(const Step& step, const PipelineSpec& spec, const Pass& pass, const Action& action) {
    return std::ranges::any_of(action.after, [&](int place) {
        const Action& earlier = step.actions[static_cast<std::size_t>(place)];
        return is_receipt(earlier) && receiving_pass(step, spec, earlier) == pass;
    });
}

// The positions of each pass's actions, in order.
std::vector<std::pair<Pass, std::vector<int>>> actions_of_passes(const Step& step, const PipelineSpec& spec) {
    std::vector<std::pair<Pass, std::vector<int>>> passes;
    std::vector<int> prepared;
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = step.actions[static_cast<std::size_t>(place)];
        if (action.stream != StreamKind::compute) continue;
        if (prepares(action.kind)) {
            prepared.push_back(place);
        } else if (const auto pass = pass_of(step, spec, action)) {
            if (passes.empty() || passes.back().first != *pass)
                passes.emplace_back(*pass, std::vector<int>());
            std::vector<int>& places = passes.back().second;
            places.insert(places.end(), prepared.begin(), prepared.end());
            places.push_back(place);
            prepared.clear();
        } else if (finishes_gradients(action.kind) && !passes.empty()) {
            passes.back().second.push_back(place);
        }
    }
    return passes;
}

// The pass of another chunk that uses the result of this pass.
std::optional<Pass> taker_of(const PipelineSpec& spec, const Pass& pass) {
    if (pass.kind == PassKind::backward_weight) return std::nullopt;
    const int chunk = pass.chunk + (pass.kind == PassKind::forward ? 1 : -1);
    if (chunk < 0 || chunk >= spec.chunks()) return std::nullopt;
    return Pass{pass.kind, chunk, pass.micro_batch};
}

// The time of a transfer. It is at least 0, as the clocks of two stages may differ by more than a transfer
// takes.
double sending(const MeasuredPass& source, const MeasuredPass& taker) {
    return std::max(0.0, taker.arrived - std::max(source.end, taker.awaited));
}

double mean(std::vector<double>& values) {
    return values.empty()
               ? 0
               : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double median(std::vector<double>& values) {
    if (values.empty()) return 0;
    std::ranges::sort(values);
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// The typical times of each chunk's passes. `typical` reduces the values to one number: median or mean.
using Typical = double (*)(std::vector<double>&);
std::vector<PassTimes> typical_times(const PipelineSpec& spec,
                                     std::span<const std::vector<MeasuredPass>> steps, Typical typical) {
    const PassKind back = spec.splits_backward() ? PassKind::backward_input : PassKind::backward;
    std::vector<PassTimes> times;
    for (int chunk = 0; chunk < spec.chunks(); ++chunk) {
        // Calls measured(pass, passes of its step) for the chunk's passes of a kind in all steps.
        const auto all_of = [&](PassKind kind, const auto& measured) {
            for (const std::vector<MeasuredPass>& passes : steps) {
                for (int micro_batch = 0; micro_batch < spec.micro_batches; ++micro_batch)
                    measured(Pass{kind, chunk, micro_batch}, passes);
            }
        };
        const auto typical_length = [&](PassKind kind, const auto& length) {
            std::vector<double> all;
            all_of(kind, [&](const Pass& pass, const std::vector<MeasuredPass>& passes) {
                all.push_back(length(passes[spec.index_of(pass)]));
            });
            return typical(all);
        };
        const auto whole = [](const MeasuredPass& pass) { return pass.end - pass.begin; };
        const auto prepared = [](const MeasuredPass& pass) { return pass.prepared; };
        // If a receive begins late, the transfer may have begun before it. Such times count only if there are
        // no others.
        std::vector<double> sent, sent_before;
        for (const PassKind kind : {PassKind::forward, back}) {
            all_of(kind, [&](const Pass& pass, const std::vector<MeasuredPass>& passes) {
                const auto other = taker_of(spec, pass);
                if (!other || spec.stage_of(other->chunk) == spec.stage_of(chunk)) return;
                const MeasuredPass &source = passes[spec.index_of(pass)],
                                   &taker = passes[spec.index_of(*other)];
                (taker.awaited <= source.end ? sent : sent_before).push_back(sending(source, taker));
            });
        }
        times.push_back(
            {.forward = typical_length(PassKind::forward, whole),
             .backward_input = typical_length(back, whole),
             .backward_weight = spec.splits_backward() ? typical_length(PassKind::backward_weight, whole) : 0,
             .communication = typical(sent.empty() ? sent_before : sent),
             .backward_prepared = typical_length(back, prepared)});
    }
    return times;
}

}  // namespace

std::vector<MeasuredPass> measured_passes(const Step& step, const PipelineSpec& spec,
                                          std::span<const ActionTime> times) {
    check(times.size() == step.actions.size(), "pipeline: the number of times is not the number of actions");
    const auto time_of = [&](int place) -> const ActionTime& {
        return times[static_cast<std::size_t>(place)];
    };
    std::vector<MeasuredPass> passes(spec.size());
    for (const auto& [pass, places] : actions_of_passes(step, spec)) {
        MeasuredPass& measured = passes[spec.index_of(pass)];
        measured.begin = time_of(places.front()).begin;
        measured.end = time_of(places.back()).end;
        double before = 0;  // the work before its input had arrived
        for (const int place : places) {
            if (awaits_input(step, spec, pass, step.actions[static_cast<std::size_t>(place)])) {
                measured.begin = std::max(measured.begin, time_of(place).begin - before);
                measured.prepared = before;
                break;
            }
            before += time_of(place).end - time_of(place).begin;
        }
    }
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = step.actions[static_cast<std::size_t>(place)];
        if (!is_receipt(action)) continue;
        MeasuredPass& measured = passes[spec.index_of(receiving_pass(step, spec, action))];
        measured.awaited = time_of(place).begin;
        measured.arrived = time_of(place).end;
    }
    // A pass with nothing to do took no time: the second half of a backward pass that is not split, or the forward pass
    // of a stage that has the head alone, whose backward pass includes it.
    const std::vector<std::vector<Pass>> order = pipeline_passes(spec);
    double end = 0;
    for (const Pass& pass : order[static_cast<std::size_t>(step.stage)]) {
        MeasuredPass& measured = passes[spec.index_of(pass)];
        const Chunk& chunk = step.part.chunks[static_cast<std::size_t>(pass.chunk / spec.stages)];
        const bool may_be_empty =
            pass.kind == PassKind::backward_weight || (pass.kind == PassKind::forward && chunk.layers() == 0);
        if (measured.end == 0 && may_be_empty)
            measured.begin = measured.end = std::max(end, measured.arrived);
        end = measured.end;
    }
    return passes;
}

Timeline measured_timeline(const PipelineSpec& spec, std::span<const MeasuredPass> passes) {
    check(passes.size() == spec.size(), "pipeline: not the passes of this schedule");
    Timeline timeline{spec.stages, spec.virtual_stages, {}};
    const std::vector<std::vector<Pass>> order = pipeline_passes(spec);
    for (int stage = 0; stage < spec.stages; ++stage) {
        for (const Pass& pass : order[static_cast<std::size_t>(stage)]) {
            const MeasuredPass& measured = passes[spec.index_of(pass)];
            check(measured.end > 0, "pipeline: a pass was not measured");
            timeline.spans.push_back({stage, pass, measured.begin, measured.end});
        }
    }
    return timeline;
}

Timeline replayed_timeline(const PipelineSpec& spec, std::span<const MeasuredPass> passes) {
    return simulate(spec, pipeline_passes(spec), [&](const Pass& pass) {
        const MeasuredPass& measured = passes[spec.index_of(pass)];
        const auto taker = taker_of(spec, pass);
        return PassTime{.duration = measured.end - measured.begin,
                        .prepared = measured.prepared,
                        .communication = taker ? sending(measured, passes[spec.index_of(*taker)]) : 0};
    });
}

std::vector<PassTimes> typical_times(const PipelineSpec& spec,
                                     std::span<const std::vector<MeasuredPass>> steps) {
    return typical_times(spec, steps, median);
}

double share_explained(const PipelineSpec& spec, std::span<const MeasuredPass> passes) {
    const std::vector<std::vector<MeasuredPass>> steps = {{passes.begin(), passes.end()}};
    const double measured = measured_timeline(spec, passes).total();
    return simulate(spec, pipeline_passes(spec), typical_times(spec, steps, mean)).total() / measured;
}

}  // namespace llmc
