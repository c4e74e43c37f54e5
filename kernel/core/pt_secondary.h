/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Secondary MMUs: what keeps translations of its own of a process' memory, such as a virtual machine
 * of KVM. Most translations have no reference to the page; for nested virtualisation KVM has one
 * and does not listen (frames.h). The core tells them by notifiers when it unmaps something; code
 * that takes leaves off a tree tells them before the pages are used for anything else.
 */
#ifndef VELLUM_PT_SECONDARY_H
#define VELLUM_PT_SECONDARY_H

#include <linux/mm_types.h>
#include <linux/mmu_notifier.h>

struct pt_mount;

/*
 * Whether nothing but a single mount can be a listener in this process, which has that mount. Every
 * listener, of either kind, has a reference to the process' memory (mm_count) from before it is
 * registered until after it has let go of what it knew. All users of the memory have one reference
 * together, the mount's notifier has another. A processor that idles may have one, too, then this is
 * false for nothing.
 *
 * Entries were changed before by an atomic operation: a listener that comes after this look reads
 * them as they are now.
 */
static inline bool pt_secondary_is_none(const struct mm_struct *mm)
{
	return atomic_read(&mm->mm_count) == 2;
}

/* Finds the functions that tell; without them only the core can, when it unmaps something. */
void pt_secondary_init(void);
bool pt_secondary_can_be_told(void);

/*
 * A process that has a tree mounted, and is to be told of it. It has it for as long as it is one of
 * these: whoever unmaps the tree waits until it is told.
 */
struct pt_listener {
	struct pt_mount		*mount;
	struct mm_struct	*mm;
	unsigned long		start;
};

/* Finds it. False: nobody has the tree mounted. The mount's lock is held. */
bool pt_listener_find(struct pt_mount *mount, struct pt_listener *listener);
/*
 * Its secondary MMUs forget what they know of the pages. Their leaves are cleared by now, or may be
 * found again. Then it is a listener no more. May sleep. False: nobody could be told.
 */
bool pt_listener_tell(const struct pt_listener *listener, u64 page, u64 count);
/* Nobody is a listener any more when this returns, if nobody can become one. */
void pt_listeners_wait(struct pt_mount *mount);

/* Whether that is what a mount's notifier is called for, which it does not concern. */
bool pt_secondary_is_ours(const struct mmu_notifier_range *range);

#endif /* VELLUM_PT_SECONDARY_H */
