// A whole model on a device in one process, controlled by the caller. The tests against PyTorch and against
// the committed reference files share it. It uses the same plan, store and executor as the trainer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/device/device.h"
#include "llmc/io/model_files.h"
#include "llmc/io/safetensors.h"
#include "llmc/parallel/step/executor.h"
#include "llmc/plan/run_plan.h"

namespace llmc::probe {

// A group of one rank: the lists of a single process contain no communication.
class Alone final : public Communicator {
  public:
    int rank() const override { return 0; }
    int size() const override { return 1; }
    void reduce_scatter(const Tensor&, const Tensor&) override { refuse(); }
    void all_gather(const Tensor&, const Tensor&) override { refuse(); }
    void all_reduce(const Tensor&) override { refuse(); }
    void maximum(const Tensor&) override { refuse(); }
    void broadcast(const Tensor&, int) override { refuse(); }
    void send(const Tensor&, int) override { refuse(); }
    void recv(const Tensor&, int) override { refuse(); }
    int start_send(const Tensor&, int) override { programming_error(what); }
    int start_recv(const Tensor&, int) override { programming_error(what); }
    bool is_done(int) override { programming_error(what); }
    void group_begin() override { refuse(); }
    void group_end() override { refuse(); }
    void barrier() override { refuse(); }
    std::unique_ptr<Communicator> split(int, int, bool) override { programming_error(what); }

  private:
    static constexpr const char* what = "communication of one process";
    static void refuse() { programming_error(what); }
};

class Model {
  public:
    // With the weights of a file. `batch` is the number of sequences in a step, in micro-batches of
    // `micro_batch`.
    Model(const std::filesystem::path& weights, const llmc::Model& model, DType dtype, std::int64_t batch,
          std::int64_t micro_batch, double weight_decay = 0, DType gradient_dtype = DType::fp32,
          std::unique_ptr<Device> device = make_cpu_device())
        : Model(model, dtype, batch, micro_batch, weight_decay, gradient_dtype, std::move(device)) {
        load_weights(weights, store_, transfer_);
    }
    // With initial weights.
    Model(const llmc::Model& model, DType dtype, std::int64_t batch, std::int64_t micro_batch,
          double weight_decay = 0, DType gradient_dtype = DType::fp32,
          std::unique_ptr<Device> device = make_cpu_device())
        : device_(std::move(device)),
          plan_(plan_run({.model = model,
                          .dtype = dtype,
                          .gradient_dtype = gradient_dtype,
                          .mesh = {},
                          .global_batch_tokens = batch * model.sequence_length,
                          .micro_batch_sequences = micro_batch,
                          .logits_bytes = device_->sizes().default_logits_bytes()},
                         device_->sizes(), 0)),
          arenas_(*device_, plan_.memory),
          store_(*device_, arenas_, plan_.store, weight_decay, 0),
          transfer_(store_, alone_, plan_.spec.mesh, plan_.parts),
          executor_(*plan_.lists, *device_, groups_, store_, bind(plan_.activations, arenas_),
                    static_cast<int>(plan_.micro_batches), false) {
        device_->ops().set_workspace(arenas_[plan_.workspace]);
        store_.initialize(1);
    }

    const llmc::Model& model() const { return plan_.spec.model; }
    ParameterStore& store() { return store_; }

    // One step on a batch of T+1 tokens per sequence. Returns the mean loss before the update. With `update`
    // false, the gradients are computed and the weights do not change.
    // `number` and `gradient_seed` are those of StepInput.
    double step(std::span<const std::int32_t> tokens, bool update, const UpdateStep& numbers = {},
                std::optional<std::uint64_t> rounding_seed = {}, std::optional<std::int64_t> number = {},
                std::uint64_t gradient_seed = 0) {
        const std::int64_t T = plan_.spec.model.sequence_length, B = plan_.micro_batch;
        const auto load = [&](int micro_batch, std::span<std::int32_t> inputs,
                              std::span<std::int32_t> targets) {
            for (std::int64_t b = 0; b < B; ++b) {
                const auto sequence =
                    tokens.subspan(static_cast<std::size_t>((micro_batch * B + b) * (T + 1)),
                                   static_cast<std::size_t>(T) + 1);
                std::copy(sequence.begin(), sequence.end() - 1, inputs.begin() + b * T);
                std::copy(sequence.begin() + 1, sequence.end(), targets.begin() + b * T);
            }
        };
        const auto tokens_in_all = static_cast<double>(plan_.spec.global_batch_tokens);
        executor_.run(plan_.training, {.load = load,
                                       .sequences = B,
                                       .step = number,
                                       .loss_scale = static_cast<float>(numbers.loss_scale / tokens_in_all),
                                       .gradient_seed = gradient_seed});
        const double loss = executor_.results().loss_sum / tokens_in_all;
        if (update)
            executor_.run(plan_.update, {.update = Update{.step = numbers, .rounding_seed = rounding_seed}});
        return loss;
    }

    // The full forward pass of one sequence: the cross-entropy of a target at one position.
    double loss_at(std::span<const std::int32_t> tokens, std::size_t position, std::int32_t target) {
        const auto load = [&](int, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
            std::ranges::copy(tokens, inputs.begin());
            std::ranges::fill(targets, ignored_target);
            targets[position] = target;
        };
        executor_.run(plan_.diagnosis, {.load = load, .sequences = 1});
        return executor_.results().loss_sum;
    }

    // The next rows of generation for one sequence: the logits of the last row.
    std::vector<double> next_rows(std::span<const std::int32_t> tokens, const RowRange& rows) {
        const auto load = [&](int, std::span<std::int32_t> inputs, std::span<std::int32_t>) {
            std::ranges::copy(
                tokens.subspan(static_cast<std::size_t>(rows.position), static_cast<std::size_t>(rows.count)),
                inputs.begin());
        };
        executor_.run(plan_.generation, {.load = load, .sequences = 1, .rows = rows});
        std::vector<double> logits;
        with_dtype(plan_.spec.dtype, [&](auto element) {
            const std::span<decltype(element)> values = executor_.logits().span<decltype(element)>();
            for (const auto x : values.first(static_cast<std::size_t>(model().vocabulary)))
                logits.push_back(to_float(x));
        });
        return logits;
    }

    double norm_squared() const { return executor_.results().norm_squared; }

    void save_gradients(const std::filesystem::path& file) {
        save_tensors(file, store_, transfer_, Kept::gradients, false,
                     has_adapters_ ? Tensors::adapters : Tensors::weights);
    }
    // With adapters, those of a file.
    void load_adapters(const std::filesystem::path& file) {
        has_adapters_ = true;
        load_stored([&] { return find_tensors(file); }, store_, transfer_, Tensors::adapters);
    }

  private:
    Alone alone_;
    MeshGroups groups_{alone_, {}, {}};
    std::unique_ptr<Device> device_;
    RunPlan plan_;
    Arenas arenas_;
    ParameterStore store_;
    UnitTransfer transfer_;
    Executor executor_;
    bool has_adapters_ = false;
};

// The batch in a file's tensor "tokens", I32 (B,T+1).
inline std::vector<std::int32_t> read_tokens(const SafetensorsReader& file) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(file.entry("tokens").shape.elements()));
    file.read("tokens", std::as_writable_bytes(std::span(tokens)));
    return tokens;
}

}  // namespace llmc::probe
