// The MPI communicator without its MPI header, for make_communicator.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace kdtree {

// InputError if the program was started without mpirun or srun, or if the environment sets no valid
// time limit for collectives.
void require_mpi_job(const ProcessGroup& group);

// Collective over MPI_COMM_WORLD.
std::unique_ptr<Communicator> make_mpi_communicator();

}  // namespace kdtree
