#include "llmc/parallel/pipeline_schedule.h"

#include <fmt/format.h>

#include <algorithm>

#include "llmc/core/error.h"
#include "llmc/core/names.h"

namespace llmc {

std::string_view name_of(PipelineSchedule schedule) {
    return name_among(schedule, "naive", "gpipe", "1f1b", "interleaved", "zb-h1");
}

std::string_view name_of(PassKind kind) {
    return name_among(kind, "forward", "backward", "backward-input", "backward-weight");
}

std::string to_string(const Pass& pass) {
    return fmt::format("{} of micro-batch {}, chunk {}", name_of(pass.kind), pass.micro_batch, pass.chunk);
}

void check_chunks(const PipelineSpec& spec, std::int64_t layers) {
    const int p = spec.stages, v = spec.virtual_stages;
    if (p < 1) user_error("--pipeline-parallel {} is out of range; give 1 or more", p);
    if (v < 1) user_error("--virtual-stages {} is out of range; give 1 or more", v);
    check(p <= layers, "pipeline: fewer layers than stages");
    if (spec.schedule != PipelineSchedule::interleaved) {
        if (v > 1)
            user_error(
                "--virtual-stages {} is for --pipeline-schedule interleaved, and --pipeline-schedule is {}; "
                "leave it "
                "out, or try --pipeline-schedule interleaved",
                v, name_of(spec.schedule));
        return;
    }
    if (v == 1)
        user_error(
            "--pipeline-schedule interleaved takes --virtual-stages 2 or more; with 1 try "
            "--pipeline-schedule 1f1b");
    // In 64 bits, where absurd sizes fit.
    if (static_cast<std::int64_t>(p) * v > layers) {
        const std::int64_t most = layers / p;
        user_error(
            "--virtual-stages {} x --pipeline-parallel {} makes {} chunks, which need a layer each, and "
            "--layers is {}; try {}",
            v, p, static_cast<std::int64_t>(p) * v, layers,
            most > 1 ? fmt::format("--virtual-stages {}", most)
                     : "--pipeline-schedule 1f1b --virtual-stages 1");
    }
}

namespace {

// Each stage begins with some forward passes, so that those behind it have something to do, then runs forward and
// backward passes in turn, then the backward passes that are left. Schedules differ in how many these are.
int forwards_first(const PipelineSpec& spec, int stage) {
    const int p = spec.stages, v = spec.virtual_stages, behind = p - 1 - stage;
    const int all = spec.micro_batches * v;
    switch (spec.schedule) {
        case PipelineSchedule::naive:
            return 0;
        case PipelineSchedule::gpipe:
            return all;
        case PipelineSchedule::one_f_one_b:
        case PipelineSchedule::zb_h1:
            return std::min(all, behind);
        case PipelineSchedule::interleaved:
            return std::min(all, 2 * behind + (v - 1) * p);
    }
    programming_error("an unknown pipeline schedule");
}

// ZB-H1: how many input parts a stage runs ahead of its weight parts. The later the stage, the fewer micro-batches
// 1F1B has under way on it, and the more room is left up to `stages` of them. So input parts reach the first stage as
// if there were no weight parts on the way, and these fill the time at the end in which 1F1B waits.
int weight_parts_behind(const PipelineSpec& spec, int stage) { return spec.splits_backward() ? stage : 0; }

// The k-th forward or backward pass of a stage: groups of p micro-batches go through one chunk after the other.
Pass nth_pass(const PipelineSpec& spec, PassKind kind, int stage, int k) {
    const int p = spec.stages, v = spec.virtual_stages;
    const int group = k / (p * v), turn = k % (p * v) / p;
    const int of_stage = kind == PassKind::forward ? turn : v - 1 - turn;
    return {kind, of_stage * p + stage, group * p + k % p};
}

std::vector<Pass> passes_of_stage(const PipelineSpec& spec, int stage) {
    const int all = spec.micro_batches * spec.virtual_stages;
    const int first = forwards_first(spec, stage), behind = weight_parts_behind(spec, stage);
    const PassKind back = spec.splits_backward() ? PassKind::backward_input : PassKind::backward;
    std::vector<Pass> passes;
    int forwards = 0, backwards = 0, weights = 0;
    const auto run = [&](PassKind kind, int& count) {
        passes.push_back(nth_pass(spec, kind, stage, count++));
    };
    while (forwards < first) run(PassKind::forward, forwards);
    while (backwards < all) {
        if (forwards < all) run(PassKind::forward, forwards);
        run(back, backwards);
        if (spec.splits_backward() && backwards - weights > behind) run(PassKind::backward_weight, weights);
    }
    while (spec.splits_backward() && weights < all) run(PassKind::backward_weight, weights);
    return passes;
}

}  // namespace

std::vector<std::vector<Pass>> pipeline_passes(const PipelineSpec& spec) {
    check(spec.virtual_stages == 1 || spec.micro_batches % spec.stages == 0,
          "interleaved: micro-batches that are no groups of the stages");
    std::vector<std::vector<Pass>> passes;
    for (int stage = 0; stage < spec.stages; ++stage) passes.push_back(passes_of_stage(spec, stage));
    return passes;
}

std::optional<Pass> source_of(const PipelineSpec& spec, const Pass& pass) {
    if (pass.kind == PassKind::backward_weight) return std::nullopt;
    const int chunk = pass.kind == PassKind::forward ? pass.chunk - 1 : pass.chunk + 1;
    if (chunk < 0 || chunk >= spec.chunks()) return std::nullopt;
    return Pass{pass.kind, chunk, pass.micro_batch};
}

std::vector<std::size_t> run_through(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                                     const std::function<void(int, const Pass&)>& visit) {
    std::vector<bool> done(spec.size(), false);
    std::vector<std::size_t> next(passes.size(), 0);
    const auto is_ready = [&](const Pass& pass) {
        const auto source = source_of(spec, pass);
        return !source || done.at(spec.index_of(*source));
    };
    for (bool moved = true; moved;) {
        moved = false;
        for (std::size_t stage = 0; stage < passes.size(); ++stage) {
            for (; next[stage] < passes[stage].size() && is_ready(passes[stage][next[stage]]);
                 ++next[stage]) {
                const Pass& pass = passes[stage][next[stage]];
                visit(static_cast<int>(stage), pass);
                done.at(spec.index_of(pass)) = true;
                moved = true;
            }
        }
    }
    return next;
}

int passes_in_flight(const PipelineSpec& spec, int stage) {
    return std::min(spec.micro_batches * spec.virtual_stages,
                    forwards_first(spec, stage) + 1 + weight_parts_behind(spec, stage));
}

}  // namespace llmc
