#include "llmc/parallel/measured_passes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {

namespace {

// The pass that an action of the compute stream belongs to by itself. What has none prepares a part of the model that
// comes next, or tidies up behind one.
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

bool tidies_up(ActionKind kind) { return kind == ActionKind::round || kind == ActionKind::accumulate; }

// The pass that waits for what is received.
Pass receiver(const Step& step, const PipelineSpec& spec, const Action& action) {
    PassKind kind = PassKind::forward;
    if (action.kind == ActionKind::receive_gradient)
        kind = spec.splits_backward() ? PassKind::backward_input : PassKind::backward;
    return {kind, step.chunk_of(action).number, action.micro_batch};
}

bool is_receipt(const Action& action) {
    return action.kind == ActionKind::receive_activation || action.kind == ActionKind::receive_gradient;
}

// Whether an action may begin only when what its pass receives is there.
bool awaits_input(const Step& step, const Action& action) {
    return std::ranges::any_of(action.after, [&](int place) {
        const Action& earlier = step.actions[static_cast<std::size_t>(place)];
        return is_receipt(earlier) && earlier.chunk == action.chunk &&
               earlier.micro_batch == action.micro_batch;
    });
}

// The places of each pass's actions, in order.
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
        } else if (tidies_up(action.kind) && !passes.empty()) {
            passes.back().second.push_back(place);
        }
    }
    return passes;
}

double median(std::vector<double>& values) {
    if (values.empty()) return 0;
    std::ranges::sort(values);
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace

std::vector<MeasuredPass> measured_passes(const Step& step, const PipelineSpec& spec,
                                          std::span<const ActionTime> times) {
    check(times.size() == step.actions.size(), "pipeline: not one time of each action");
    const auto time_of = [&](int place) -> const ActionTime& {
        return times[static_cast<std::size_t>(place)];
    };
    std::vector<MeasuredPass> passes(spec.size());
    for (const auto& [pass, places] : actions_of_passes(step, spec)) {
        MeasuredPass& measured = passes[spec.index_of(pass)];
        measured.begin = time_of(places.front()).begin;
        measured.end = time_of(places.back()).end;
        double before = 0;  // what it did before its input was there
        for (const int place : places) {
            if (awaits_input(step, step.actions[static_cast<std::size_t>(place)])) {
                measured.begin = std::max(measured.begin, time_of(place).begin - before);
                break;
            }
            before += time_of(place).end - time_of(place).begin;
        }
    }
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = step.actions[static_cast<std::size_t>(place)];
        if (!is_receipt(action)) continue;
        MeasuredPass& measured = passes[spec.index_of(receiver(step, spec, action))];
        measured.awaited = time_of(place).begin;
        measured.arrived = time_of(place).end;
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

std::vector<PassTimes> usual_times(const PipelineSpec& spec,
                                   std::span<const std::vector<MeasuredPass>> steps) {
    const PassKind back = spec.splits_backward() ? PassKind::backward_input : PassKind::backward;
    std::vector<PassTimes> times;
    for (int chunk = 0; chunk < spec.chunks(); ++chunk) {
        const auto usual = [&](PassKind kind) {
            std::vector<double> all;
            for (const std::vector<MeasuredPass>& passes : steps) {
                for (int micro_batch = 0; micro_batch < spec.micro_batches; ++micro_batch) {
                    const MeasuredPass& pass = passes[spec.index_of({kind, chunk, micro_batch})];
                    all.push_back(pass.end - pass.begin);
                }
            }
            return median(all);
        };
        // What was awaited late may have been on its way before.
        std::vector<double> sent, sent_before;
        for (const std::vector<MeasuredPass>& passes : steps) {
            for (const PassKind kind : {PassKind::forward, back}) {
                const int to = kind == PassKind::forward ? chunk + 1 : chunk - 1;
                if (to < 0 || to >= spec.chunks() || spec.stage_of(to) == spec.stage_of(chunk)) continue;
                for (int micro_batch = 0; micro_batch < spec.micro_batches; ++micro_batch) {
                    const MeasuredPass& source = passes[spec.index_of({kind, chunk, micro_batch})];
                    const MeasuredPass& taker = passes[spec.index_of({kind, to, micro_batch})];
                    // Clocks of two stages may differ by more than this takes.
                    const double took = std::max(0.0, taker.arrived - std::max(source.end, taker.awaited));
                    (taker.awaited <= source.end ? sent : sent_before).push_back(took);
                }
            }
        }
        times.push_back({.forward = usual(PassKind::forward),
                         .backward_input = usual(back),
                         .backward_weight = spec.splits_backward() ? usual(PassKind::backward_weight) : 0,
                         .communication = median(sent.empty() ? sent_before : sent)});
    }
    return times;
}

}  // namespace llmc
