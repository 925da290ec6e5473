// Makes the order of passes of each schedule, and checks such orders.
#include "llmc/parallel/pipeline/pipeline_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {

std::string_view name_of(PipelineSchedule schedule) {
    return name_among(schedule, "naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1");
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
    if (spec.schedule != PipelineSchedule::interleaved && spec.schedule != PipelineSchedule::breadth_first) {
        if (v > 1)
            refuse({"several chunks a stage need the interleaved schedule", v, 1,
                    "--pipeline-schedule interleaved"},
                   "--virtual-stages {} needs --pipeline-schedule interleaved or breadth-first, but "
                   "--pipeline-schedule is {}; leave it out, or try --pipeline-schedule interleaved",
                   v, name_of(spec.schedule));
        return;
    }
    if (v == 1 && spec.schedule == PipelineSchedule::interleaved)
        refuse({"the interleaved schedule needs several chunks a stage", v, 2, "--pipeline-schedule 1f1b"},
               "--pipeline-schedule interleaved needs --virtual-stages 2 or more; with 1, try "
               "--pipeline-schedule 1f1b");
    // In 64 bits, so that very large sizes do not overflow.
    if (static_cast<std::int64_t>(p) * v > layers) {
        const std::int64_t most = layers / p;
        const std::string change = most > 1 ? fmt::format("--virtual-stages {}", most)
                                            : "--pipeline-schedule 1f1b --virtual-stages 1";
        refuse(
            {"a layer for each chunk of a stage", static_cast<std::int64_t>(p) * v, layers, change},
            "--virtual-stages {} x --pipeline-parallel {} makes {} chunks, but --layers is {} and each chunk "
            "needs a layer; try {}",
            v, p, static_cast<std::int64_t>(p) * v, layers, change);
    }
}

namespace {

// How many forward passes a stage runs first, so that later stages have work. Then it alternates forward and
// backward passes, and ends with the remaining backward passes. Schedules differ in this number.
int forwards_first(const PipelineSpec& spec, int stage) {
    const int p = spec.stages, v = spec.virtual_stages, behind = p - 1 - stage;
    const int all = spec.micro_batches * v;
    switch (spec.schedule) {
        case PipelineSchedule::naive:
            return 0;
        case PipelineSchedule::gpipe:
        case PipelineSchedule::breadth_first:
            return all;
        case PipelineSchedule::one_f_one_b:
        case PipelineSchedule::zb_h1:
            return std::min(all, behind);
        case PipelineSchedule::interleaved:
            return std::min(all, 2 * behind + (v - 1) * p);
    }
    programming_error("an unknown pipeline schedule");
}

// ZB-H1: how many passes a stage's backward_input may be ahead of its backward_weight. With 1F1B, later
// stages hold fewer micro-batches, so they have memory for `stage` more. Input gradients then reach the first
// stage without waiting for weight gradients, which fill the idle time at the end.
int weight_halves_behind(const PipelineSpec& spec, int stage) { return spec.splits_backward() ? stage : 0; }

// The k-th forward or backward pass of a stage. Groups of micro-batches go through one chunk after another.
Pass nth_pass(const PipelineSpec& spec, PassKind kind, int stage, int k) {
    const int size = spec.group(), v = spec.virtual_stages;
    const int group = k / (size * v), turn = k % (size * v) / size;
    const int of_stage = kind == PassKind::forward ? turn : v - 1 - turn;
    return {kind, of_stage * spec.stages + stage, group * size + k % size};
}

}  // namespace

std::vector<Pass> passes_of_stage(const PipelineSpec& spec, int stage) {
    check(spec.micro_batches % spec.group() == 0,
          "interleaved: the number of micro-batches is not a multiple of the stages");
    const int all = spec.micro_batches * spec.virtual_stages;
    const int first = forwards_first(spec, stage), behind = weight_halves_behind(spec, stage);
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

std::vector<std::vector<Pass>> pipeline_passes(const PipelineSpec& spec) {
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
                    forwards_first(spec, stage) + 1 + weight_halves_behind(spec, stage));
}

namespace {

class StageChecker {
  public:
    StageChecker(const PipelineSpec& spec, int stage)
        : spec_(spec), stage_(stage), most_(passes_in_flight(spec, stage)) {}

    void visit(const Pass& pass, std::size_t position) {
        const auto require = [&](bool condition, std::string_view fault) {
            if (!condition) {
                programming_error(fmt::format("pipeline {}: stage {}, pass {} ({}) {}",
                                              name_of(spec_.schedule), stage_, position, to_string(pass),
                                              fault));
            }
        };
        require(pass.chunk >= 0 && pass.chunk < spec_.chunks() && spec_.stage_of(pass.chunk) == stage_,
                "is of a chunk of another stage");
        require(pass.micro_batch >= 0 && pass.micro_batch < spec_.micro_batches,
                "is of a micro-batch that is not there");
        require(is_of_schedule(pass.kind), "is of a kind that the schedule does not have");
        int& done = done_[{pass.chunk, pass.kind}];
        require(pass.micro_batch >= done, "comes a second time");
        require(pass.micro_batch == done, "comes before that of an earlier micro-batch");
        ++done;
        if (pass.kind == PassKind::forward) {
            require(++in_flight_ <= most_,
                    fmt::format("holds more than the activations of {} passes", most_));
            return;
        }
        require(done <= done_[{pass.chunk, PassKind::forward}], "is a backward pass before its forward pass");
        if (pass.kind == PassKind::backward_weight) {
            require(done <= done_[{pass.chunk, PassKind::backward_input}],
                    "makes weight gradients before the gradient of its input");
        }
        if (pass.kind != PassKind::backward_input) --in_flight_;
    }

    void finish() const {
        for (int chunk = stage_; chunk < spec_.chunks(); chunk += spec_.stages) {
            for (const PassKind kind : {PassKind::forward, PassKind::backward, PassKind::backward_input,
                                        PassKind::backward_weight}) {
                if (!is_of_schedule(kind)) continue;
                const auto found = done_.find({chunk, kind});
                const int done = found == done_.end() ? 0 : found->second;
                if (done < spec_.micro_batches) {
                    programming_error(fmt::format("pipeline {}: stage {} lacks {}", name_of(spec_.schedule),
                                                  stage_, to_string(Pass{kind, chunk, done})));
                }
            }
        }
    }

  private:
    bool is_of_schedule(PassKind kind) const {
        return kind == PassKind::forward || (kind != PassKind::backward) == spec_.splits_backward();
    }

    const PipelineSpec& spec_;
    int stage_, most_;
    int in_flight_ = 0;
    std::map<std::pair<int, PassKind>, int> done_;  // micro-batches done, by chunk
};

void check_end(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes) {
    const std::vector<std::size_t> next = run_through(spec, passes, [](int, const Pass&) {});
    for (std::size_t stage = 0; stage < passes.size(); ++stage) {
        if (next[stage] == passes[stage].size()) continue;
        const Pass& pass = passes[stage][next[stage]];
        programming_error(fmt::format("pipeline {}: stage {}, pass {} ({}) waits for ever for the {}",
                                      name_of(spec.schedule), stage, next[stage], to_string(pass),
                                      to_string(*source_of(spec, pass))));
    }
}

}  // namespace

void check_passes(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes) {
    check(passes.size() == static_cast<std::size_t>(spec.stages),
          "pipeline: not one list of passes per stage");
    for (int stage = 0; stage < spec.stages; ++stage) {
        StageChecker checker(spec, stage);
        const std::vector<Pass>& of_stage = passes[static_cast<std::size_t>(stage)];
        for (std::size_t i = 0; i < of_stage.size(); ++i) checker.visit(of_stage[i], i);
        checker.finish();
    }
    check_end(spec, passes);
}

}  // namespace llmc
