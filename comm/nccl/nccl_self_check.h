// Sends known data over a communicator and looks at what arrives: there are machines on which peer
// access is reported, and delivers zeros.
#pragma once

#include "comm/communicator.h"

namespace kdtree {

// Every kind of collective on small and larger tensors of the current CUDA device, so that every
// pair of ranks has talked. Collective; Error on the rank that received something wrong.
void check_delivery(Communicator& communicator);

}  // namespace kdtree
