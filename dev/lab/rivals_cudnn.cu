// rivals_cudnn.h by cuDNN's graph interface (docs: "Attention", scaled dot product attention). Q, K and V are
// read in place from packed (B, T, 3, NH, HS), as our kernels read them, and the gradient of V and so on are
// written packed.
#include "dev/lab/rivals_cudnn.h"

#include <cudnn_frontend.h>

#include <cmath>
#include <memory>
#include <unordered_map>

#include "dev/lab/memory.h"

namespace lab {
namespace {

namespace fe = cudnn_frontend;
using TensorAttributes = fe::graph::Tensor_attributes;

void check_graph(fe::error_t error) { llmc::check(error.is_good(), "cuDNN: " + error.get_message()); }

class Attention {
  public:
    Attention(std::int64_t b, std::int64_t t, std::int64_t nh, std::int64_t hs, bool backward)
        : b_(b), t_(t), nh_(nh), hs_(hs), qkv_(3 * b * t * nh * hs), out_(b * t * nh * hs), lse_(b * nh * t) {
        Draw draw(1);
        draw.normal(qkv_, 1);
        llmc::check(cudnnCreate(&handle_) == CUDNN_STATUS_SUCCESS, "cudnnCreate");
        build_forward();
        if (!backward) return;
        forward();  // out and lse, which backward reads
        dqkv_ = std::make_unique<Array<bf16>>(qkv_.size());
        dout_ = std::make_unique<Array<bf16>>(out_.size());
        draw.normal(*dout_, 1);
        build_backward();
    }
    ~Attention() { cudnnDestroy(handle_); }
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;

    void forward() { execute(*forward_); }
    void backward() { execute(*backward_); }

  private:
    struct Plan {
        fe::graph::Graph graph;
        std::unordered_map<std::int64_t, void*> memory;
        std::unique_ptr<Array<char>> workspace;
    };

    std::unique_ptr<Plan> new_plan() {
        auto plan = std::make_unique<Plan>();
        plan->graph.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        return plan;
    }

    // (B, NH, T, HS) of part 0, 1, 2 of packed memory, or of memory of its own.
    std::vector<std::int64_t> sizes() const { return {b_, nh_, t_, hs_}; }
    std::vector<std::int64_t> strides(int parts) const {
        return {parts * t_ * nh_ * hs_, hs_, parts * nh_ * hs_, 1};
    }
    TensorAttributes described(Plan& plan, const char* name, void* data, int parts) {
        const std::int64_t uid = static_cast<std::int64_t>(plan.memory.size()) + 1;
        plan.memory[uid] = data;
        return TensorAttributes().set_name(name).set_uid(uid).set_dim(sizes()).set_stride(strides(parts));
    }
    std::shared_ptr<TensorAttributes> input(Plan& plan, const char* name, const bf16* data, int parts) {
        return plan.graph.tensor(described(plan, name, const_cast<bf16*>(data), parts));
    }
    void output(Plan& plan, const std::shared_ptr<TensorAttributes>& tensor, bf16* data, int parts) {
        const std::int64_t uid = static_cast<std::int64_t>(plan.memory.size()) + 1;
        plan.memory[uid] = data;
        tensor->set_output(true).set_uid(uid).set_dim(sizes()).set_stride(strides(parts));
    }
    const bf16* part(int i) const { return qkv_.data() + i * nh_ * hs_; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(hs_)); }

    void build_forward() {
        forward_ = new_plan();
        Plan& plan = *forward_;
        auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
        options.set_causal_mask(true).set_attn_scale(scale());
        auto [out, stats] = plan.graph.sdpa(input(plan, "Q", part(0), 3), input(plan, "K", part(1), 3),
                                            input(plan, "V", part(2), 3), options);
        output(plan, out, out_.data(), 1);
        const std::int64_t uid = static_cast<std::int64_t>(plan.memory.size()) + 1;
        plan.memory[uid] = lse_.data();
        stats->set_output(true).set_data_type(fe::DataType_t::FLOAT).set_uid(uid);
        build(plan);
    }

    void build_backward() {
        backward_ = new_plan();
        Plan& plan = *backward_;
        const auto q = input(plan, "Q", part(0), 3), k = input(plan, "K", part(1), 3),
                   v = input(plan, "V", part(2), 3);
        const auto out = input(plan, "O", out_.data(), 1), dout = input(plan, "dO", dout_->data(), 1);
        const std::int64_t uid = static_cast<std::int64_t>(plan.memory.size()) + 1;
        plan.memory[uid] = lse_.data();
        const auto stats = plan.graph.tensor(TensorAttributes()
                                                 .set_name("stats")
                                                 .set_uid(uid)
                                                 .set_dim({b_, nh_, t_, 1})
                                                 .set_stride({nh_ * t_, t_, 1, 1})
                                                 .set_data_type(fe::DataType_t::FLOAT));
        auto options = fe::graph::SDPA_backward_attributes().set_name("attention backward");
        options.set_causal_mask(true).set_attn_scale(scale()).set_deterministic_algorithm(true);
        auto [dq, dk, dv] = plan.graph.sdpa_backward(q, k, v, out, dout, stats, options);
        output(plan, dq, dqkv_->data(), 3);
        output(plan, dk, dqkv_->data() + nh_ * hs_, 3);
        output(plan, dv, dqkv_->data() + 2 * nh_ * hs_, 3);
        build(plan);
    }

    void build(Plan& plan) {
        check_graph(plan.graph.build(handle_, {fe::HeurMode_t::A}));
        std::int64_t bytes = 0;
        check_graph(plan.graph.get_workspace_size(bytes));
        plan.workspace = std::make_unique<Array<char>>(std::max<std::int64_t>(bytes, 1));
    }

    void execute(Plan& plan) {
        check_graph(plan.graph.execute(handle_, plan.memory, plan.workspace->data()));
    }

    std::int64_t b_, t_, nh_, hs_;
    Array<bf16> qkv_, out_;
    Array<float> lse_;
    std::unique_ptr<Array<bf16>> dqkv_, dout_;
    cudnnHandle_t handle_ = nullptr;
    std::unique_ptr<Plan> forward_, backward_;
};

}  // namespace

std::vector<Rival> cudnn_rivals(const std::string& operation, const std::vector<std::int64_t>& shape) {
    const bool backward = operation == "attention_backward";
    if (!backward && operation != "attention_forward") return {};
    const auto attention = std::make_shared<Attention>(shape[0], shape[1], shape[2], shape[3], backward);
    return {{"cuDNN", [attention, backward] { backward ? attention->backward() : attention->forward(); }}};
}

}  // namespace lab
