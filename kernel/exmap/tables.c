// SPDX-License-Identifier: GPL-2.0
/*
 * The last level of the surface's page tables, shown to the process (refined exmap, section III-C):
 * an entry a page, of which the process reads whether the page is there. What it sees is what the
 * processor walks, so nobody may ever write it: the mapping cannot be made writable by mprotect,
 * and what writes for a debugger is refused as well.
 */

#include <linux/capability.h>
#include <linux/mm.h>

#include "core/compat.h"
#include "exmap/exmap.h"

static vm_fault_t tables_fault(struct vm_fault *vmf)
{
	struct exmap *exmap = vmf->vma->vm_private_data;
	/* By the offset, which parts of the mapping keep. */
	u64 page = (vmf->pgoff - (VELLUM_EXMAP_OFFSET_TABLES >> PAGE_SHIFT)) * PT_ENTRIES;
	u64 *table = pt_tree_make_leaf(&exmap->tree, page);

	/* Memory may be missing for good, as the user has a limit: the CPU must not fault again. */
	if (!table)
		return VM_FAULT_SIGBUS;
	return vmf_insert_pfn(vmf->vma, vmf->address, page_to_pfn(virt_to_page(table)));
}

static const struct vm_operations_struct tables_operations = { .fault = tables_fault };

int exmap_map_tables(struct exmap *exmap, struct vm_area_struct *vma)
{
	/* They hold physical addresses. */
	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	if (!(vma->vm_flags & VM_SHARED) || vma->vm_flags & (VM_WRITE | VM_EXEC))
		return -EACCES;
	/* 2 MiB that are one entry have no table. */
	if (exmap->flags & VELLUM_EXMAP_HUGE)
		return -EOPNOTSUPP;
	/* While the surface is mapped it has all of its tables but the last level's. */
	if (READ_ONCE(exmap->mount.mm) != vma->vm_mm)
		return -ENODEV;
	if (vma_pages(vma) > DIV_ROUND_UP(exmap->tree.pages, PT_ENTRIES))
		return -EINVAL;
	pt_vma_change_flags(vma, VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY,
			    VM_MAYWRITE | VM_MAYEXEC);
	/* The process keeps what it sees: no table is freed any more before the exmap ends. */
	exmap->shows_tables = true;
	vma->vm_ops = &tables_operations;
	vma->vm_private_data = exmap;
	return 0;
}
