// Part of CudaOps: the update, and what Muon needs.
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/matrices.cuh"
#include "llmc/device/cuda/update.cuh"
#include "llmc/device/cuda/update_8bit.cuh"

namespace llmc::cuda {

namespace {

// The buffers of an update whose parameters, master weights and gradients have these types.
template <class Formula, class X, class Master, class Gradient>
class UpdateLaunch {
  public:
    UpdateLaunch(const LaunchContext& on, const OptimizerUpdate& op, StepNumbers<Formula>* numbers)
        : on_(on), op_(op), numbers_(numbers) {
        store_numbers(on, numbers, op.step);
    }

    void run(std::int64_t n) const {
        if constexpr (states == 0) {
            run_in<float>();
        } else {
            const DType kept = op_.state.front().values.dtype;
            if (kept == DType::uint8) return run_in_8_bits(n);
            kept == DType::bf16 ? run_in<bf16>() : run_in<float>();
        }
    }

  private:
    static constexpr int states = states_of<Formula>;

    template <class State>
    void run_in() const {
        UpdateBuffers<Formula, X, Master, State, Gradient> buffers{
            .parameters = elements<X>(op_.parameters),
            .master = elements<Master>(op_.master),
            .state = {},
            .gradients = elements<Gradient>(op_.gradients)};
        for (int s = 0; s < states; ++s)
            buffers.state[s] = elements<State>(op_.state[static_cast<std::size_t>(s)].values);
        update(on_, buffers, elements<double>(op_.norm_squared), numbers_, op_.segments, op_.rounding,
               op_.rounding_of_state);
    }

    void run_in_8_bits(std::int64_t n) const {
        EightBitBuffers<Formula, X, Master, Gradient> buffers{};
        buffers.parameters = elements<X>(op_.parameters);
        buffers.master = elements<Master>(op_.master);
        buffers.gradients = elements<Gradient>(op_.gradients);
        for (int s = 0; s < states; ++s) {
            const UpdateState& state = op_.state[static_cast<std::size_t>(s)];
            buffers.state[s] = elements<std::uint8_t>(state.values);
            buffers.amax[s] = elements<float>(state.amax);
            buffers.packed[s] = elements<float>(state.packed);
        }
        update_8bit(on_, buffers, n, elements<double>(op_.norm_squared), numbers_, op_.segments,
                    op_.rounding);
    }

    const LaunchContext& on_;
    const OptimizerUpdate& op_;
    StepNumbers<Formula>* numbers_;
};

}  // namespace

void CudaOps::compute(const OptimizerUpdate& op, std::int64_t n) {
    with_formula(op.optimizer, [&]<class Formula>() {
        auto* const numbers = static_cast<StepNumbers<Formula>*>(workspace(sizeof(StepNumbers<Formula>)));
        const LaunchContext here = on();
        const auto run = [&]<class X, class Master, class Gradient>() {
            UpdateLaunch<Formula, X, Master, Gradient>(here, op, numbers).run(n);
        };
        with_kernel_type(op.parameters.dtype, [&]<class X>() {
            if constexpr (std::is_same_v<X, bf16>) {
                with_gradient_type(op.gradients.dtype, [&]<class Gradient>() {
                    if (op.master.dtype == DType::bf16) return run.template operator()<X, X, Gradient>();
                    run.template operator()<X, float, Gradient>();
                });
            } else if (op.gradients.dtype == DType::fp32) {
                run.template operator()<X, float, float>();
            } else {
                // A direction in bf16.
                constexpr bool takes_bf16 = states_of<Formula> == 0 && std::is_same_v<X, fp16>;
                check(takes_bf16, "update: gradients in bf16 are of parameters in bf16");
                if constexpr (takes_bf16) run.template operator()<X, float, bf16>();
            }
        });
    });
}

void CudaOps::compute(const Momentum& op, std::int64_t) {
    check(op.out.dtype != DType::fp16, "momentum: a direction is in fp32 or bf16");
    with_gradient_type(op.out.dtype, [&]<class X>() {
        with_gradient_type(op.state.dtype, [&]<class State>() {
            with_gradient_type(op.gradients.dtype, [&]<class Gradient>() {
                momentum(on(), elements<X>(op.out), elements<State>(op.state),
                         elements<Gradient>(op.gradients), elements<double>(op.norm_squared), op.step,
                         op.segments, op.rounding_of_state);
            });
        });
    });
}

void CudaOps::compute(const CopyMatrix& op, std::int64_t) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        copy_matrix(on(), elements<X>(op.out), elements<X>(op.in), op.rows, op.columns, op.out_stride,
                    op.in_stride, op.transposed);
    });
}

void CudaOps::compute(const Combine& op, std::int64_t n) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        combine(on(), elements<X>(op.out), elements<X>(op.x), op.y ? elements<X>(op.y) : nullptr, op.a, op.b,
                op.norm_squared ? elements<double>(op.norm_squared) : nullptr, n);
    });
}

}  // namespace llmc::cuda
