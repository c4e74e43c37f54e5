/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Secondary MMUs: what keeps translations of its own of a process' memory, without references to the
 * pages, such as a virtual machine of KVM. The core tells them by notifiers when it unmaps something;
 * who takes leaves off a tree has to do it himself, before the pages are used for anything else.
 */
#ifndef VELLUM_PT_SECONDARY_H
#define VELLUM_PT_SECONDARY_H

#include <linux/mmu_notifier.h>

/* Finds the functions that tell; without them only the core can, when it unmaps something. */
void pt_secondary_init(void);
bool pt_secondary_can_be_told(void);

/*
 * They forget what they know of the range. Its leaves are cleared by now, or may be found again. May
 * sleep. False: nobody could be told.
 */
bool pt_secondary_invalidate(struct mm_struct *mm, unsigned long start, unsigned long end);

/* Whether that is what a mount's notifier is called for, which it does not concern. */
bool pt_secondary_is_ours(const struct mmu_notifier_range *range);

#endif /* VELLUM_PT_SECONDARY_H */
