# Run by `cmake -P` in every build: writes OUTPUT from build_info.cpp.in with the commit of SOURCE_DIR.

set(COMMIT unknown)
find_program(GIT_PROGRAM git)
if(GIT_PROGRAM)
  # The prefix is empty only at the root of a checkout: an unpacked archive inside somebody else's repository is unknown.
  execute_process(COMMAND ${GIT_PROGRAM} rev-parse --show-prefix
    WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE prefix RESULT_VARIABLE status
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(status EQUAL 0 AND prefix STREQUAL "")
    execute_process(COMMAND ${GIT_PROGRAM} describe --always --dirty --abbrev=12 --exclude=*
      WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE described RESULT_VARIABLE status
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(status EQUAL 0)
      set(COMMIT ${described})
    endif()
  endif()
endif()

configure_file(${CMAKE_CURRENT_LIST_DIR}/build_info.cpp.in ${OUTPUT} @ONLY)
