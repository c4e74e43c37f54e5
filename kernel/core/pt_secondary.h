/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Secondary MMUs keep translations of a process' memory of their own: a virtual machine of KVM is
 * one. Most translations hold no reference to the page. For nested virtualisation KVM holds one and
 * does not listen (frames.h). The core tells secondary MMUs by notifiers when it unmaps something.
 * Code that takes leaves off a tree tells them before the pages are used for anything else.
 */
#ifndef VELLUM_PT_SECONDARY_H
#define VELLUM_PT_SECONDARY_H

#include <linux/mm_types.h>
#include <linux/mmu_notifier.h>

struct pt_mount;

/*
 * Whether this process, which has a single mount, can have no other listener than that mount. Every
 * listener, of either kind, has a reference to the process' memory (mm_count) from before it is
 * registered until after it has released what it knew. All users of the memory have one reference
 * together, and the mount's notifier has another. An idle CPU may have one, too; then the answer is
 * a harmless false.
 *
 * Entries were changed before by an atomic operation. A listener that registers after this reads
 * the entries as they are now.
 */
static inline bool pt_secondary_is_none(const struct mm_struct *mm)
{
	return atomic_read(&mm->mm_count) == 2;
}

/* Finds the functions that tell. Without them only the core can tell, when it unmaps something. */
void pt_secondary_init(void);
bool pt_secondary_can_be_told(void);

/*
 * A process that has a tree mounted and is to be told of changes. While it is a listener it keeps
 * the mount: a thread that unmaps the tree waits until the listener was told.
 */
struct pt_listener {
	struct pt_mount		*mount;
	struct mm_struct	*mm;
	unsigned long		start;
};

/* Finds the listener. False: no process has the tree mounted. The mount's lock is held. */
bool pt_listener_find(struct pt_mount *mount, struct pt_listener *listener);
/*
 * Makes the listener's secondary MMUs forget the pages. The leaves are cleared by now, or may be
 * found again. Afterwards it is a listener no more. May sleep. False: they could not be told.
 */
bool pt_listener_tell(const struct pt_listener *listener, u64 page, u64 count);
/* Waits until there is no listener. The caller has made sure that none can come. */
void pt_listeners_wait(struct pt_mount *mount);

/* Whether the module itself has caused the notification, which then does not concern the mount. */
bool pt_secondary_is_ours(const struct mmu_notifier_range *range);

#endif /* VELLUM_PT_SECONDARY_H */
