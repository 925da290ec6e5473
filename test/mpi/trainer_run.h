// A run of the program on all ranks with given options, without files, for tests of its trainer.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llmc/data/data.h"
#include "llmc/data/training_batches.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/options.h"
#include "llmc/train/run_spec.h"
#include "llmc/train/trainer.h"
#include "mpi_test.h"

namespace llmc::test {

class TrainerRun {
  public:
    // `more`: the options after those of a small model.
    explicit TrainerRun(std::vector<const char*> more, std::unique_ptr<Device> device = make_cpu_device(1))
        : device_(std::move(device)),
          options_(parse(std::move(more))),
          mesh_(options_.mesh(world().size(), world().rank())),
          plan_(plan_run(run_spec(options_, mesh_, device_->sizes()), device_->sizes(), 0)),
          groups_(world(), mesh_, plan_.parts),
          trainer_(options_, plan_, *device_, world(), groups_) {}

    Trainer& trainer() { return trainer_; }
    Device& device() { return *device_; }
    Options& options() { return options_; }
    const Mesh& mesh() const { return mesh_; }
    const RunPlan& plan() const { return plan_; }

  private:
    static Options parse(std::vector<const char*> options) {
        options.insert(options.begin(),
                       {"train_gpt", "--layers=2", "--heads=2", "--channels=32", "--seq-len=8",
                        "--global-batch-tokens=384", "--micro-batch-size=1", "--device=cpu"});
        std::string text;
        return for_device(*parse_options(static_cast<int>(options.size()), options.data(), text),
                          DeviceKind::cpu);
    }

    std::unique_ptr<Device> device_;
    Options options_;
    Mesh mesh_;
    RunPlan plan_;
    MeshGroups groups_;
    Trainer trainer_;
};

// A run that trains on the stories.
class StoriesRun : public TrainerRun {
  public:
    using TrainerRun::TrainerRun;

    StepMetrics step() { return trainer().train_step(batches_); }

    // One instance for all runs.
    const Data& data() const {
        static const Data stories = open_data({.train_data = {},
                                               .val_data = {},
                                               .vocabulary = plan().spec.model.vocabulary,
                                               .sequence_length = plan().spec.model.sequence_length});
        return stories;
    }

  private:
    TrainingSamples samples_{*data().training, plan().spec.model.sequence_length, options().seed};
    TrainingBatches batches_{samples_, plan().share(), plan().spec.model.sequence_length};
};

}  // namespace llmc::test
