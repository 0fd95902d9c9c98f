// Ranks started by mpirun or srun.
#pragma once

#include <memory>

#include "comm/process_group.h"

namespace kdtree {

// Calls MPI_Init (once a process) and owns MPI_Finalize. InputError where the launcher started
// several processes that MPI sees as a world of one each ("singletons": srun without --mpi=pmix, an
// mpirun of another MPI), unless `single` says that one rank is meant.
std::unique_ptr<ProcessGroup> make_mpi_process_group(int* argc, char*** argv, bool single = false);

// Whether a launcher's environment says that this process is one of an MPI job.
bool launched_as_mpi_job();

// InputError if a launcher's environment names several tasks, for a program that is about to run as
// a single rank.
void require_no_lost_ranks();

}  // namespace kdtree
