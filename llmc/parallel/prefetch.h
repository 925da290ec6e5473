// Where the parameters are kept in shards: puts the gathers into a list that says when whole parameters are used and
// released.
#pragma once

#include "llmc/parallel/step.h"

namespace llmc {

// Before a part of the model reads parameters that are not whole, they are gathered: Sharding::prefetch_units parts
// ahead, or as soon as what lies in their place has been released.
void insert_gathers(Step& step);

}  // namespace llmc
