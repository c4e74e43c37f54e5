// SPDX-License-Identifier: GPL-2.0
/*
 * Flushes of translations, after entries have changed and before a frame is reused: those that CPUs
 * cache, and those of secondary MMUs, such as a virtual machine whose memory the surface is.
 *
 * The flush asks the CPUs of the process that gave the command. If that process has unmapped the
 * surface meanwhile, and another one has mapped it, the flush asks the CPUs of the other process as
 * well.
 */

#include <linux/mm.h>

#include "core/pt_flush.h"
#include "exmap/exmap.h"

void exmap_flush(struct exmap *exmap, struct mm_struct *mm, u64 first, u64 last)
{
	unsigned long start = READ_ONCE(exmap->mount.start);

	if (last - first >= EXMAP_FLUSH_PAGES) {
		exmap_flush_all(exmap, mm);
		return;
	}
	pt_flush_range(mm, start + (first << PAGE_SHIFT), start + ((last + 1) << PAGE_SHIFT));
	pt_mount_tell(&exmap->mount, mm, first, last - first + 1);
}

void exmap_flush_extent(struct exmap *exmap, struct mm_struct *mm, u64 page)
{
	pt_flush_huge(mm, READ_ONCE(exmap->mount.start) + (page << PAGE_SHIFT));
	pt_mount_tell(&exmap->mount, mm, page, PT_ENTRIES);
}

void exmap_flush_all(struct exmap *exmap, struct mm_struct *mm)
{
	pt_flush_all(mm);
	pt_mount_tell(&exmap->mount, mm, 0, exmap->tree.pages);
}

void exmap_flush_zeros(struct exmap *exmap, struct exmap_interface *interface,
		       struct mm_struct *mm, unsigned int zeros)
{
	exmap_flush_all(exmap, mm);
	interface->flushes++;
	if (zeros & EXMAP_ZEROS_COUNTED) {
		smp_mb__before_atomic(); /* flushed before a command finds the count lower */
		atomic_dec(&exmap->over_zeros);
	}
}
