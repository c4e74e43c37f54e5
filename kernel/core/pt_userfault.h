/* SPDX-License-Identifier: GPL-2.0 */
/*
 * On some kernels userfaultfd with asynchronous write protection takes mappings of any kind. It
 * then changes page tables without a notification before it has walked into them, and would find
 * the tables of the module. Other kernels refuse what is not ordinary memory, and need no help.
 */
#ifndef VELLUM_PT_USERFAULT_H
#define VELLUM_PT_USERFAULT_H

#include <linux/types.h>

struct mm_struct;

/* Makes this kernel refuse mappings that mount a tree, if it does not refuse them by itself. */
void pt_userfault_init(void);
void pt_userfault_exit(void);
/*
 * Whether the kernel refuses them at this time. If not, nothing may be mounted. The mmap lock is
 * held for writing.
 */
bool pt_userfault_is_refused(struct mm_struct *mm);

#endif /* VELLUM_PT_USERFAULT_H */
