// The meaning of the numbers in a matrix product's shape, for the lab's operations and the libraries that
// they are compared with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/core/error.h"

namespace lab {

struct MatmulShape {
    std::int64_t rows, in_channels, out_channels;

    explicit MatmulShape(const std::vector<std::int64_t>& shape) {
        llmc::check(shape.size() == 3, "a product has three sizes");
        rows = shape[0];
        in_channels = shape[1];
        out_channels = shape[2];
    }
    static std::vector<std::string> sizes() { return {"rows", "in_channels", "out_channels"}; }
};

}  // namespace lab
