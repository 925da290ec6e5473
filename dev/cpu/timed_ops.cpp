#include "dev/cpu/timed_ops.h"

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <utility>
#include <variant>

namespace llmc::bench {

namespace {

// The name of an operation; of a product also its shape: "matmul_forward 384 -> 1536 GELU" for a weight (OC,IC).
std::string name_with_shape(const Op& op) {
    return std::visit(
        []<class O>(const O& of) {
            if constexpr (requires {
                              of.weight;
                              of.pre_gelu;
                              of.in.dtype;
                          }) {
                const auto [rows, IC, OC] = of.sizes();
                return fmt::format("{} {} -> {}{}", O::name, IC, OC, of.pre_gelu ? " GELU" : "");
            } else {
                return std::string(O::name);
            }
        },
        op);
}

class TimedOps final : public Ops {
  public:
    explicit TimedOps(Ops& ops) : ops_(ops) {}

    WorkByOperation take_work() { return std::exchange(work_, {}); }

    void set_workspace(const Tensor& workspace) override { ops_.set_workspace(workspace); }

    void run(const Op& op) override {
        const auto start = std::chrono::steady_clock::now();
        ops_.run(op);
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        const OpCost cost = cost_of(op);
        Work& work = work_[name_with_shape(op)];
        work.calls += 1;
        work.seconds += elapsed.count();
        work.flops += cost.flops;
        work.bytes += cost.bytes;
        work.dtype = cost.dtype;
    }

  private:
    Ops& ops_;
    WorkByOperation work_;
};

}  // namespace

TimedDevice::TimedDevice(Device& device) : DeviceWithOps(device, std::make_unique<TimedOps>(device.ops())) {}

WorkByOperation TimedDevice::take_work() { return static_cast<TimedOps&>(ops()).take_work(); }

}  // namespace llmc::bench
