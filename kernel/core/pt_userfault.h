/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Userfaultfd, with asynchronous write protection, takes mappings of any kind on some kernels, and
 * then changes page tables without saying so before it has walked into them: it would find ours.
 * Other kernels refuse what is not ordinary memory, and need nothing.
 */
#ifndef VELLUM_PT_USERFAULT_H
#define VELLUM_PT_USERFAULT_H

#include <linux/types.h>

struct mm_struct;

/* Has this kernel refuse what has a tree mounted, if it does not by itself. */
void pt_userfault_init(void);
void pt_userfault_exit(void);
/*
 * Whether it does at this time; nothing may be mounted otherwise. The mmap lock is held for writing.
 */
bool pt_userfault_is_refused(struct mm_struct *mm);

#endif /* VELLUM_PT_USERFAULT_H */
