// Simulates the passes of a pipeline, and computes the lengths and idle times of timelines.
#include "llmc/parallel/pipeline/pipeline_simulation.h"

#include <fmt/format.h>

#include <algorithm>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {

double duration(const Pass& pass, const PassTimes& times) {
    switch (pass.kind) {
        case PassKind::forward:
            return times.forward;
        case PassKind::backward:
            return times.backward_input + times.backward_weight;
        case PassKind::backward_input:
            return times.backward_input;
        case PassKind::backward_weight:
            return times.backward_weight;
    }
    programming_error("an unknown pass");
}

std::vector<PassTimes> equal_times(const PipelineSpec& spec, const PassTimes& times) {
    return std::vector<PassTimes>(static_cast<std::size_t>(spec.chunks()), times);
}

Timeline simulate(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                  const std::vector<PassTimes>& times) {
    check(times.size() == static_cast<std::size_t>(spec.chunks()), "pipeline: not one time of each chunk");
    return simulate(spec, passes, [&](const Pass& pass) {
        const PassTimes& time = times[static_cast<std::size_t>(pass.chunk)];
        const bool waits = pass.kind == PassKind::backward || pass.kind == PassKind::backward_input;
        return PassTime{.duration = duration(pass, time),
                        .prepared = waits ? time.backward_prepared : 0,
                        .communication = time.communication};
    });
}

Timeline simulate(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                  const std::function<PassTime(const Pass&)>& time_of) {
    Timeline timeline{spec.stages, spec.virtual_stages, {}};
    std::vector<double> ends(spec.size(), 0);
    std::vector<double> free(passes.size(), 0);  // when a stage becomes free
    const auto arrival = [&](const Pass& pass) {
        const auto source = source_of(spec, pass);
        if (!source) return 0.0;
        const bool is_sent = spec.stage_of(source->chunk) != spec.stage_of(pass.chunk);
        return ends[spec.index_of(*source)] + (is_sent ? time_of(*source).communication : 0);
    };
    const auto run = run_through(spec, passes, [&](int stage, const Pass& pass) {
        double& now = free[static_cast<std::size_t>(stage)];
        const PassTime time = time_of(pass);
        const double begin = std::max(now, arrival(pass) - time.prepared);
        now = begin + time.duration;
        ends[spec.index_of(pass)] = now;
        timeline.spans.push_back({stage, pass, begin, now});
    });
    for (std::size_t stage = 0; stage < passes.size(); ++stage)
        check(run[stage] == passes[stage].size(), "pipeline: passes wait for each other for ever");
    return timeline;
}

std::string Timeline::text_of(double time) const {
    return unit.empty() ? human_seconds(time) : fmt::format("{:.4g} {}", time, unit);
}

double Timeline::begin() const {
    const auto first = std::ranges::min_element(spans, {}, &Span::begin);
    return first == spans.end() ? 0 : first->begin;
}

double Timeline::total() const {
    const auto last = std::ranges::max_element(spans, {}, &Span::end);
    return last == spans.end() ? 0 : last->end - begin();
}

double Timeline::work(int stage) const {
    double sum = 0;
    for (const Span& span : spans) sum += span.stage == stage ? span.end - span.begin : 0;
    return sum;
}

double Timeline::peak_in_flight(int stage) const {
    int held = 0, most = 0;
    for (const Span& span : spans) {
        if (span.stage != stage) continue;
        if (span.pass.kind == PassKind::forward) most = std::max(most, ++held);
        if (span.pass.kind == PassKind::backward || span.pass.kind == PassKind::backward_weight) --held;
    }
    return static_cast<double>(most) / virtual_stages;
}

Timeline without_empty_halves(const Timeline& timeline, const std::function<bool(int chunk)>& is_split) {
    Timeline whole = timeline;
    std::erase_if(whole.spans, [&](const Span& span) {
        return span.pass.kind == PassKind::backward_weight && !is_split(span.pass.chunk);
    });
    for (Span& span : whole.spans) {
        if (span.pass.kind == PassKind::backward_input && !is_split(span.pass.chunk))
            span.pass.kind = PassKind::backward;
    }
    return whole;
}

Bubble bubble(const Timeline& timeline) {
    return timeline.bubble_of_step.value_or(bubble(timeline, timeline, 0));
}

Bubble bubble(const Timeline& timeline, const Timeline& longer, double times) {
    double idle = 0, work = 0;
    for (int stage = 0; stage < timeline.stages; ++stage) {
        idle += timeline.idle(stage) + times * (longer.idle(stage) - timeline.idle(stage));
        work += timeline.work(stage) + times * (longer.work(stage) - timeline.work(stage));
    }
    return {.over_total = idle + work > 0 ? idle / (idle + work) : 0,
            .over_useful = work > 0 ? idle / work : 0};
}

}  // namespace llmc
