#include "llmc/model/tensor_parallel.h"

namespace llmc {

Tensor TensorParallel::enter(const Tensor& own, const std::optional<Tensor>& gathered) const {
    if (!divides_tokens()) return own;
    Shape shape = own.shape;
    shape.resize(1, shape[1] * size());
    const Tensor all = gathered->flat(0, shape.elements()).view(shape);
    gather(all, own);
    return all;
}

Tensor TensorParallel::leave(const Tensor& addend) const {
    if (!is_shared()) return addend;
    if (!divides_tokens()) {
        if (!is_silent_) group_->all_reduce(addend);
        return addend;
    }
    Shape shape = addend.shape;
    shape.resize(1, shape[1] / size());
    const Tensor own = addend.flat(rank() * shape.elements(), shape.elements()).view(shape);
    if (!is_silent_) group_->reduce_scatter(own, addend);
    return own;
}

}  // namespace llmc
