// Follows each stage's passes, and then all stages side by side, to the first fault (pipeline_schedule.h).
#include <fmt/format.h>

#include <map>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/parallel/pipeline_schedule.h"

namespace llmc {

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
        require(done <= done_[{pass.chunk, PassKind::forward}], "goes back before it went forward");
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
    std::map<std::pair<int, PassKind>, int> done_;  // micro-batches, by chunk
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
    check(passes.size() == static_cast<std::size_t>(spec.stages), "pipeline: not one list of passes a stage");
    for (int stage = 0; stage < spec.stages; ++stage) {
        StageChecker checker(spec, stage);
        const std::vector<Pass>& of_stage = passes[static_cast<std::size_t>(stage)];
        for (std::size_t i = 0; i < of_stage.size(); ++i) checker.visit(of_stage[i], i);
        checker.finish();
    }
    check_end(spec, passes);
}

}  // namespace llmc
